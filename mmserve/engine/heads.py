"""A trained head for the model that is served: where it lies, and the drafter that it makes.

Owns the folders that heads are found in. Knows nothing of steps or sequences.
"""

from __future__ import annotations

from pathlib import Path

from mmserve.engine.model_runner import ModelRunner
from mmserve.engine.target_parts import target_parts
from mmserve.model.hub import locate
from mmserve.model.supported import MODELS
from mmserve.spec.eagle import load_eagle
from mmserve.spec.eagle_drafter import EagleDrafter
from mmserve.spec.head_files import HeadError, read_head
from mmserve.spec.medusa import MedusaDrafter, load_medusa

SHIPPED = {"eagle": "drafter", "medusa": "drafter-medusa"}  # beside a native model's own files


def load_head(
    method: str, name: str | None, runner: ModelRunner, target: str, most: int = 0
) -> EagleDrafter | MedusaDrafter:
    """`name`: a folder or hub id; None: what came with the model `target`. `most`: tokens of a
    tree, 0 for chains. Raises `HeadError`, and `ModelUnavailableError` as `locate` does."""
    file = read_head(_folder(method, name, target))
    parts = target_parts(runner)
    if method == "medusa":
        return MedusaDrafter(load_medusa(file, parts), most)
    return EagleDrafter(load_eagle(file, parts), parts, most=most)


def has_head(method: str, target: str) -> bool:
    """Whether a head came with the model."""
    return (MODELS / target / SHIPPED[method]).is_dir()


def _folder(method: str, name: str | None, target: str) -> Path:
    if name is not None:
        return locate(name).folder
    folder = MODELS / target / SHIPPED[method]
    if not folder.is_dir():
        raise HeadError(
            f"no {method} head comes with {target}: name one as the speculative configuration's "
            "model, or make one with `mmserve train-drafter`"
        )
    return folder

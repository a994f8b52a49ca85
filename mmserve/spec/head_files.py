"""Files of trained heads: a folder of config.json and weights.

Owns reading what is published (safetensors or PyTorch's own files) and writing ours, whose matrices
may be 8-bit. Knows nothing of what the tensors are for. The form of 8-bit matrices: `NAME` int8
[N, K] and `NAME.scale` float32 [N], whose product by rows is the matrix.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmserve.errors import first_line
from mmserve.whole_file import replacing

SCALE = ".scale"
WEIGHTS = "model.safetensors"


class HeadError(ValueError):
    """A drafter that cannot be loaded; one sentence says which, and why."""


class HeadFile(NamedTuple):
    """`tensors`: floats as they were saved, 8-bit ones as float32; whole numbers and bits too."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def number(self, name: str, default: float | None = None) -> float:
        """One of the configuration's. Raises `HeadError` where it is none and has no default."""
        value = self.config.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise HeadError(f"{self.folder}: config.json says no {name}")
        return value


def read_head(folder: Path) -> HeadFile:
    """Raises `HeadError`."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        files = _weights(folder)
        tensors = {name: t for file in files for name, t in _load(file).items()}
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise HeadError(f"{folder} holds no drafter: {first_line(error)}") from error
    if not isinstance(config, dict):
        raise HeadError(f"{folder} holds no drafter: config.json is no JSON object")
    return HeadFile(folder, config, widened(tensors))


def _weights(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.pt"))
    found = found or sorted(folder.glob("*.bin"))
    if not found:
        raise OSError("it has no *.safetensors, *.pt or *.bin file")
    return found


def _load(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        found: dict[str, Tensor] = load_file(file)
        return found
    loaded = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(loaded, dict):
        raise ValueError(f"{file.name} is no mapping of tensors")
    return {str(k): v for k, v in loaded.items() if isinstance(v, Tensor)}


def write_head(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Whole or not at all, file by file; a folder that is there is written over."""
    folder.mkdir(parents=True, exist_ok=True)
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(folder / WEIGHTS) as part:
        save_file(held, part, metadata={"format": "pt"})
    with replacing(folder / "config.json") as part:
        part.write_text(json.dumps(dict(config), indent=2) + "\n", "utf-8")


def narrowed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices of floats as 8 bits and a scale by row; everything else as it is."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or not tensor.is_floating_point():
            out[name] = tensor
            continue
        scale = tensor.float().abs().amax(1).clamp_min(1e-12) / 127
        out[name] = (tensor.float() / scale[:, None]).round().to(torch.int8)
        out[name + SCALE] = scale
    return out


def widened(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `narrowed` made, as floats again."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE) and name.removesuffix(SCALE) in tensors:
            continue
        scale = tensors.get(name + SCALE)
        out[name] = tensor if scale is None else tensor.float() * scale.float()[:, None]
    return out

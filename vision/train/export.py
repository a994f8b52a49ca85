"""A trained model's files, as it is served from: a description and the folder of its weights.

Owns their names and precision, which are those of the model that ships. Knows nothing of training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mmserve.vision.train.learner import Learner
from mmserve.vision.train.stage import Stage
from mmserve.whole_file import replacing

VISION, RESAMPLER, ADAPTER = (
    f"{name}.safetensors" for name in ("vision", "resampler", "adapter_model")
)


def description(data: Mapping[str, Any], stage: Stage) -> dict[str, Any]:
    """A model's JSON with the stage's latents and crops, its files where `write_model` writes
    them."""
    latents = stage.latents
    made: dict[str, Any] = json.loads(json.dumps(data))
    name = made["name"]
    made["lora"]["file"] = f"{name}/{ADAPTER}"
    made["vision"]["files"] = [f"{name}/{VISION}", f"{name}/{RESAMPLER}"]
    made["vision"]["compressor"]["latent_grid"] = list(latents.grid)
    made["vision"]["compressor"]["nested"] = list(latents.sizes)
    made["vision"]["details"] = dict(latents.details)
    made["vision"].pop("crops", None)  # what is not trained is not served
    if stage.crops is not None:
        made["vision"]["crops"] = asdict(stage.crops)
    return made


def write_model(out: Path, data: Mapping[str, Any], learner: Learner) -> int:
    """`data`: the description. Each file is there whole or not at all. Their bytes."""
    folder = out / data["name"]
    folder.mkdir(parents=True, exist_ok=True)
    vision = learner.vision.state_dict()
    parts = {
        VISION: {k: v for k, v in vision.items() if k.startswith("visual.")},
        RESAMPLER: {k: v for k, v in vision.items() if k.startswith("resampler.")},
        ADAPTER: learner.lora.tensors(),
    }
    for name, tensors in parts.items():
        with replacing(folder / name) as part:
            save_file({_shipped(key): _half(value) for key, value in tensors.items()}, part)
    with replacing(out / f"{data['name']}.json") as part:
        part.write_text(json.dumps(data, indent=2) + "\n", "utf-8")
    return sum((folder / name).stat().st_size for name in parts)


def _shipped(key: str) -> str:
    """A tensor's name in the files: timm's, where a tower is timm's."""
    return key.replace("visual.trunk.", "visual.", 1)


def _half(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.bfloat16).contiguous()

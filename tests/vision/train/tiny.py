"""A tiny model to train on the CPU: the tiny language model, a tiny trunk and a few latents."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from mmserve.model.spec import read_vision
from mmserve.tokenizer import Tokenizer
from mmserve.vision.crops import Crops
from mmserve.vision.model import VisionModel
from mmserve.vision.train.assets import Assets
from mmserve.vision.train.dialogue import Scribe
from mmserve.vision.train.lora import DOWN, PREFIX, UP
from mmserve.vision.train.recipe import Start
from mmserve.vision.train.stage import Distillation, Latents, Packing, Rates, Stage
from mmserve.vision.train.stream import Drawing
from tests.engine.tiny import HIDDEN, tiny_model, tiny_tokenizer

SIZE = 64  # pixels a side
DATA: dict[str, Any] = {
    "name": "tiny",
    "lora": {"file": "elsewhere", "alpha": 8},
    "vision": {
        "files": [],
        "preprocess": {"size": SIZE, "mean": [0.5] * 3, "std": [0.5] * 3},
        "encoder": {
            "vision_cfg": {
                "image_size": SIZE,
                "timm_model_name": "test_efficientnet",
                "timm_pool": "",
                "timm_proj": "none",
            },
            "features": [3, 4],
            "fold_batch_norm": True,
        },
        "compressor": {
            "levels": {
                "16": [{"feature": 0, "channels": 48}],
                "32": [{"feature": 1, "channels": 64}],
            },
            "width": 32,
            "heads": 2,
            "layers": 1,
            "latent_grid": [2, 2],
            "local_sigmas": [0.2],
            "hidden_size": HIDDEN,
        },
    },
}
STAGE = Stage(
    name="tiny",
    model="tiny",
    seed=5,
    updates=12,
    minutes=60,
    rates=Rates(1e-3, 1e-3, 1e-3),
    latents=Latents((4, 2), {2: 0.3, 4: 0.3, 8: 0.4}, {"low": 2}),
    mixture={"colour": (1, 1), "shape": (1, 2), "count": (2, 1)},
    frozen=("visual.trunk.conv_stem", "visual.trunk.blocks.0"),
    packing=Packing(rows=1, tokens=448, images=3, shards=2),
    text=Distillation(tokens=100, rows=1, weight=1.0),
)
# Large pictures in pieces; a shard has room for one and a small picture.
CUT = replace(
    STAGE,
    mixture={"colour": (1, 1), "small_text": (1, 1), "small_emoji": (1, 1)},
    packing=Packing(rows=1, tokens=512, images=6, shards=2),
    crops=Crops(2 * SIZE, 4),
)


def assets(folder: Path) -> Assets:
    """For skills that draw shapes alone."""
    (folder / "assets.zip").touch()
    return Assets(folder / "assets.zip")


def adapter(lm: nn.Module, rank: int = 4) -> dict[str, Tensor]:
    """Random, in PEFT's format."""
    generator = torch.Generator().manual_seed(9)
    made = {}
    for name, module in lm.named_modules():
        if isinstance(module, nn.Linear) and "layers" in name:
            out, into = module.weight.shape
            made[f"{PREFIX}{name}{DOWN}"] = torch.randn(rank, into, generator=generator) * 0.05
            made[f"{PREFIX}{name}{UP}"] = torch.randn(out, rank, generator=generator) * 0.05
    return made


def start() -> Start:
    loaded = tiny_model(max_model_len=1024)
    torch.manual_seed(11)
    vision = read_vision(DATA["vision"])
    model = VisionModel(vision)
    for parameter in model.resampler.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1)
    spec = SimpleNamespace(**{**vars(loaded.spec), "image_size": SIZE, "vision": vision})
    tensors = {k.replace("visual.trunk.", "visual."): v for k, v in model.state_dict().items()}
    loaded = replace(loaded, spec=spec)
    return Start(loaded, adapter(loaded.lm), tensors, copy.deepcopy(DATA))


def drawing(folder: Path, stage: Stage = STAGE) -> Drawing:
    return drawing_from(assets(folder), stage)


def drawing_from(drawn: Assets, stage: Stage) -> Drawing:
    spec: Any = start().loaded.spec
    return Drawing(stage, drawn, Scribe(tiny_words(), spec), SIZE)


def tiny_words() -> Tokenizer:
    return Tokenizer(tiny_tokenizer(), ["<|im_end|>"])

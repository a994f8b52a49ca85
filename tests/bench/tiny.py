"""A shape, a plan and a probe small enough for a test."""

from __future__ import annotations

from mmserve.bench.ceilings import Probe
from mmserve.bench.dims import ModelShape, TextDims, TowerDims
from mmserve.bench.engine_cases import Plan
from mmserve.bench.load import Window

TOWER = TowerDims("siglip", 2, 32, 2, 48, patch=14, image_size=56, latent_grid=(2, 2))
PATCHES = TowerDims("clip", 2, 32, 2, 48, patch=14, image_size=56, latent_grid=None)
TEXT = TextDims("mistral", 2, 64, 4, 2, 16, 96, 300, 1e6)
SHAPE = ModelShape("tiny", TEXT, TOWER, max_model_len=512)

WINDOW = Window(seconds=0.05, max_steps=4, min_steps=2, warm_up=1)
PLAN = Plan(
    decode=((1, 24), (4, 24), (1, 40), (4, 40)),
    energy_decode=(4, 24),
    prefill=64,
    question=4,
    view=3,
    repeats=3,
    image_repeats=2,
    sessions=4,
    shared=(2, 3),
    private=8,
    window=WINDOW,
)
PROBE = Probe(copy_bytes=1 << 20, matrix=64, repeats=3)

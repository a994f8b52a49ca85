"""A tower for a GPU gives the features that transformers' own gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tests.kernels.interpreter  # noqa: F401
from mmserve.bench.dims import TowerDims
from mmserve.bench.tower import ShapedVision
from mmserve.model import span_attention
from mmserve.model.cuda_tower import SPAN_TOWERS, SpanAttention, fuse_towers
from tests.model import families
from tests.model.border import open_border, png

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def features(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        found = model.model.get_image_features(**inputs)
    pooled = getattr(found, "pooler_output", found)
    return torch.cat(list(pooled)) if isinstance(pooled, (list, tuple)) else pooled


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "idefics3", "gemma3"])
def test_features_are_the_models_own(name: str, tmp_path: Path) -> None:
    border = open_border(families.build(name, tmp_path))
    model, _ = families.load(tmp_path / name, "sdpa")
    image = border.see(png(families.picture(1, 140, 168)))
    inputs = {k: v.to(DEVICE) for k, v in image.inputs.items() if isinstance(v, torch.Tensor)}
    model = model.to(DEVICE)
    before = features(model, inputs)
    span_attention.install(model)
    fuse_towers(model)
    torch.testing.assert_close(features(model, inputs), before, rtol=1e-4, atol=1e-4)
    towers: list[Any] = [m for m in model.modules() if type(m).__name__ in SPAN_TOWERS]
    assert len(towers) == name.startswith("qwen")
    for tower in towers:
        assert all(isinstance(block.attn, SpanAttention) for block in tower.blocks)
        assert not any(isinstance(m, nn.Conv3d) for m in tower.modules())


@pytest.mark.parametrize("family", ["siglip", "qwen2.5-vl"])
def test_so_are_the_tokens_of_the_benchs_towers(family: str) -> None:
    """Three kinds of windows, of 64, 48 and 36 patches."""
    grid = (11, 11) if family != "siglip" else (2, 2)
    dims = TowerDims(family, 4, 80, 2, 100, patch=14, image_size=308, latent_grid=grid)
    torch.manual_seed(1)
    vision = ShapedVision(dims, 32, torch.float32).eval().requires_grad_(False).to(DEVICE)
    pixels = torch.randint(0, 256, (1, 3, 308, 308), dtype=torch.uint8, device=DEVICE)
    before = vision.encode(pixels)
    fuse_towers(vision)
    torch.testing.assert_close(vision.encode(pixels), before, rtol=1e-4, atol=1e-4)


def test_products_of_a_gated_tower_have_whole_lines(tmp_path: Path) -> None:
    families.build("qwen2_5_vl", tmp_path)
    model, _ = families.load(tmp_path / "qwen2_5_vl", "sdpa")
    fuse_towers(model)
    for block in model.model.visual.blocks:
        mlp = block.mlp
        assert mlp.gate_proj.weight.shape[0] == mlp.up_proj.weight.shape[0] == 64
        assert mlp.down_proj.weight.shape[1] == 64


def test_patches_lie_one_after_the_other(tmp_path: Path) -> None:
    """As a convolution leaves them, they lie channel by channel."""
    families.build("gemma3", tmp_path)
    model, _ = families.load(tmp_path / "gemma3", "sdpa")
    (embeddings,) = (m for m in model.modules() if hasattr(m, "patch_embedding"))
    parts: Any = embeddings
    size = parts.image_size
    pixels = torch.randn(1, 3, size, size)
    with torch.no_grad():
        before = embeddings(pixels)
        fuse_towers(model)
        after = embeddings(pixels)
    assert torch.equal(before, after) and after.is_contiguous() and not before.is_contiguous()

"""Spans grouped by length give what a call for each span gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from mmserve.model import span_attention
from tests.model import families
from tests.model.border import open_border, png


@pytest.mark.parametrize(
    "borders", [[0, 7], [0, 3, 6, 9], [0, 4, 5, 9, 10, 14], [0, 0, 5, 5, 6], [0, 1]]
)
def test_a_row_reads_its_own_span(borders: list[int]) -> None:
    count = borders[-1]
    q, k, v = torch.randn(3, 1, 2, count, 8, generator=torch.Generator().manual_seed(1))
    edges = torch.tensor(borders)
    out, _ = span_attention.span_attention(nn.Identity(), q, k, v, None, 0.3, cu_seq_lens_q=edges)
    parts = [
        functional.scaled_dot_product_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], scale=0.3)
        for a, b in zip(borders, borders[1:], strict=False)
        if b > a
    ]
    torch.testing.assert_close(out, torch.cat(parts, 2).transpose(1, 2))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_towers_give_the_same_features_in_fewer_calls(name: str, tmp_path: Path) -> None:
    border = open_border(families.build(name, tmp_path))
    model, _ = families.load(tmp_path / name, "sdpa")
    image = border.see(png(families.picture(1, 140, 168)))
    inputs: dict[str, Any] = dict(image.inputs)

    def features() -> torch.Tensor:
        with torch.no_grad():
            found = model.model.get_image_features(**inputs)
        pooled = getattr(found, "pooler_output", found)
        return torch.cat(list(pooled)) if isinstance(pooled, (list, tuple)) else pooled

    before = features()
    calls = []
    span_attention.install(model)
    tower = model.model.visual
    assert tower.config._attn_implementation == span_attention.NAME
    hooks = [
        block.attn.proj.register_forward_hook(lambda *_: calls.append(1)) for block in tower.blocks
    ]
    torch.testing.assert_close(features(), before, rtol=1e-4, atol=1e-4)
    assert len(calls) == len(hooks)


def test_other_towers_are_left_alone(tmp_path: Path) -> None:
    for name in ("llava", "pixtral", "internvl", "llama_gqa"):
        model, _ = families.load(families.build(name, tmp_path), "sdpa")
        span_attention.install(model)
        names = {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
        assert span_attention.NAME not in names


def test_a_tower_that_is_told_its_layout_gives_the_same_and_reads_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    border = open_border(families.build("qwen2_5_vl", tmp_path))
    model, _ = families.load(tmp_path / "qwen2_5_vl", "sdpa")
    span_attention.install(model)
    tower, image = model.model.visual, border.see(png(families.picture(1, 140, 168)))
    pixels, grid = (torch.as_tensor(image.inputs[n]) for n in ("pixel_values", "image_grid_thw"))
    with torch.no_grad():
        expected = tower(pixels, grid_thw=grid).pooler_output
        told = span_attention.layout(tower, grid)
        tower(pixels, grid_thw=grid, **told)  # spans are sorted once
        reads: list[str] = []
        for name in ("tolist", "item"):
            monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name: reads.append(name))
        got = tower(pixels, grid_thw=grid, **told).pooler_output
    assert torch.equal(got, expected) and not reads

"""Attention in vision towers that cut an image into spans (Qwen2-VL and later), few calls a layer.

Owns the grouping of spans by length: transformers calls its attention once for each span, 81 times
a layer for an image of 1,000 pixels a side. Knows nothing of language models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, vision_utils

# transformers hands whole rows and their borders to what has this word in its name.
NAME = "mmserve_flash_spans"


def install(model: Any) -> None:
    """Have a model's tower use it, where the tower is of the kind."""
    towers = [m for m in model.modules() if hasattr(m, "blocks") and hasattr(m, "patch_embed")]
    if not any(_takes_spans(tower) for tower in towers):
        return
    AttentionInterface.register(NAME, span_attention)
    for tower in towers:
        if _takes_spans(tower):
            tower.config._attn_implementation = NAME


def _takes_spans(tower: Any) -> bool:
    attention = getattr(tower.blocks[0], "attn", None)
    forward = getattr(type(attention), "forward", None)
    code = getattr(forward, "__code__", None)
    return code is not None and "cu_seqlens" in code.co_varnames


def layout(tower: Any, grid: Tensor) -> dict[str, Any]:
    """What the forward of a Qwen2.5-VL tower would work out from `grid` [1, 3] (time, rows and
    columns of patches), and read back from the device in between; by its arguments' names, where
    `grid` is."""
    merge, config = tower.spatial_merge_size, tower.config
    index, windows = vision_utils.get_vision_window_index(
        grid, merge, window_size=tower.window_size, patch_size=tower.patch_size
    )
    spans = vision_utils.get_vision_cu_seqlens(grid)
    return {
        "position_ids": vision_utils.get_vision_position_ids(grid, merge),
        "window_index": index,
        "cu_seqlens": spans,
        "cu_window_seqlens": windows,
        "max_seqlen": vision_utils.get_max_seqlen(spans, config),
        "max_window_seqlen": vision_utils.get_max_seqlen(windows, config),
    }


def span_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None = None,
    scaling: float | None = None,
    *,
    cu_seq_lens_q: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """query, key, value [1, H, T, D]; borders of spans cu_seq_lens_q [S + 1] -> [1, T, H, D].

    A row reads its own span.
    """
    # An image's borders are one tensor for all layers, and to read them is to wait for the device.
    borders: Any = cu_seq_lens_q
    groups: list[Tensor] | None = getattr(borders, "by_length", None)
    if groups is None:
        groups = borders.by_length = _by_length(borders)
    out = torch.empty_like(query)
    for rows in groups:  # [n, L]
        q, k, v = (x[0][:, rows].transpose(0, 1) for x in (query, key, value))
        read = functional.scaled_dot_product_attention(q, k, v, scale=scaling)
        out[0, :, rows.flatten()] = read.transpose(0, 1).flatten(1, 2)
    return out.transpose(1, 2), None


def longest(borders: Tensor) -> int:
    """Rows of the longest span."""
    known: Any = borders
    found: int | None = getattr(known, "longest", None)
    if found is None:  # as above
        found = known.longest = int((borders[1:] - borders[:-1]).max())
    return found


def _by_length(borders: Tensor) -> list[Tensor]:
    """Row numbers [n, L] of the n spans of each length L."""
    ends = borders.tolist()
    spans: dict[int, list[int]] = {}
    for start, end in zip(ends, ends[1:], strict=False):
        if end > start:
            spans.setdefault(end - start, []).append(start)
    return [
        torch.tensor(starts, device=borders.device)[:, None]
        + torch.arange(length, device=borders.device)
        for length, starts in spans.items()
    ]

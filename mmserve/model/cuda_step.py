"""What one model call on a GPU reads and writes: `CUDAStep`.

Owns how attention goes over the pools by a step's tables, and over a long chunk alone by PyTorch's
own kernels. Knows nothing of sequences, scheduling or weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from mmserve.cache.kv_pool import KVPool
from mmserve.kernels import attention, fused
from mmserve.kernels.kv_formats import Pages
from mmserve.kernels.launch import Launch
from mmserve.kernels.packed_pages import fill_pages
from mmserve.kernels.reference import read_slots
from mmserve.kernels.row_attention import attend_row
from mmserve.model.attention import Place

# Of PyTorch's dense attention, the best first: on an H200 cuDNN's is twice its flash one's speed.
BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
DENSE_MULTIPLE = 512  # keys of a dense chunk


class DenseChunk(NamedTuple):
    """A long chunk that reads nothing but itself, causally: rows [first_row, first_row + num_rows).

    `slots` [N] int64 are those of its keys in the text pool, N >= num_rows a multiple of
    DENSE_MULTIPLE (any slot stands for what is missing): the library prepares itself once for each
    length. `images`: which of its rows are images' and their slots in the vision pool, int64 [M]
    each.
    """

    first_row: int
    num_rows: int
    slots: Tensor
    images: tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class CUDAStep:
    """One model call's attention, by layer group where not said otherwise.

    `work` int32: the tables of mmserve.kernels.work, one set a group; `slots` [groups, T] int32 as
    an `AttentionPlan` names them, and so `filled`, where a group has a residual; `rope` [positions,
    2, D / 2] float32: by it queries are turned back before images stored at local positions;
    `turns`: what fused layers rotate by, None where the model computes it; `places`: each layer's
    group, and its number there; `lone`: there is but one row, of text, whose own key is the last
    that it reads; `apart`: no row reads a page that another one fills.
    """

    work: Tensor
    slots: Tensor
    rope: Tensor
    turns: fused.Turns | None
    scratch: attention.Scratch
    launch: Launch
    text: tuple[KVPool, ...]
    vision: tuple[KVPool, ...]
    places: dict[int, Place]
    dense: tuple[tuple[DenseChunk, ...], ...] = ()
    lone: bool = False
    filled: Tensor | None = None
    apart: bool = False

    def pools(self, layer: int) -> tuple[Pages, Pages]:
        """Of text and of images."""
        group, number = self.places[layer]
        return self.text[group].layer(number), self.vision[group].layer(number)

    def written(self, layer: int) -> tuple[Pages, Pages]:
        """Those that tokens are stored in, text's residual in its place; then `fill`."""
        text, vision = self.pools(layer)
        return text if text.residual is None else text.residual, vision

    def fill(self, layer: int) -> None:
        """The step's tokens are stored: so are the pages that are full by them, unless that can be
        done while it reads."""
        full = None if self.apart else self._full(layer)
        if full is not None:
            fill_pages(self.pools(layer)[0], *full)

    def _full(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Slots and what is filled, where text has a residual."""
        group, number = self.places[layer]
        if self.filled is None or self.text[group].layer(number).residual is None:
            return None
        return self.slots[group], self.filled[group]

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, H, D], k and v [T, Hkv, D], rotated -> [T, H, D]; stores k and v."""
        fused.store(k, v, self.slots[self.places[layer][0]], *self.written(layer))
        self.fill(layer)
        return self.read(layer, q.contiguous(), scale, softcap, sinks)

    def look(self, layer: int, q: Tensor, kv_heads: int, scale: float) -> Tensor:
        """q [T, H, D] over images that are stored already -> [T, H, D]."""
        return self.read(layer, q.contiguous(), scale)

    def read(
        self,
        layer: int,
        q: Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, H, D] over what is stored -> [T, H, D]."""
        group, out, pools = self.places[layer][0], torch.empty_like(q), self.pools(layer)
        attention.paged_attention(
            *(q, self.work, *pools, self.rope, scale, self.scratch, out, self.launch),
            group=group,
            softcap=softcap,
            sinks=sinks,
            full=self._full(layer) if self.apart else None,
        )
        for chunk in self.dense[group] if self.dense else ():
            assert softcap is None and sinks is None
            rows = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
            out[rows] = _read_densely(chunk, q[rows], *_gather(chunk, *pools, q.dtype), scale)
        return out

    def read_row(
        self,
        layer: int,
        qkv: Tensor,
        turns: fused.Turns,
        scale: float,
        out: Tensor,
        *,
        norm: fused.HeadNorm | None = None,
        rotary: int | None = None,
        softcap: float | None = None,
    ) -> None:
        """The `lone` row's heads from qkv [1, (H + 2 Hkv) D]: stored, and what they read in out
        [1, H, D]; see `attend_row`."""
        group = self.places[layer][0]
        attend_row(
            *(qkv, turns, self.slots[group], self.work, *self.pools(layer), self.rope, scale),
            *(self.scratch, out, self.launch),
            norm=norm,
            rotary=rotary,
            group=group,
            softcap=softcap,
        )


def _gather(
    chunk: DenseChunk, text: Pages, vision: Pages, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """K and V of a chunk's rows as the pools give them back, each [1, Hkv, N, D]."""
    found = read_slots(text, chunk.slots)
    if chunk.images is not None:
        rows, slots = chunk.images
        for own, seen in zip(found, read_slots(vision, slots), strict=True):
            own.index_copy_(1, rows, seen.to(own.dtype))
    k, v = (own.to(dtype)[None] for own in found)
    return k, v


def _read_densely(
    chunk: DenseChunk, q: Tensor, keys: Tensor, values: Tensor, scale: float
) -> Tensor:
    """q [num_rows, H, D] -> the same."""
    asked = functional.pad(q, (0, 0, 0, 0, 0, len(chunk.slots) - chunk.num_rows))
    with sdpa_kernel(BACKENDS, set_priority=True):
        read = functional.scaled_dot_product_attention(
            asked.transpose(0, 1)[None], keys, values, is_causal=True, scale=scale, enable_gqa=True
        )
    return read[0, :, : chunk.num_rows].transpose(0, 1)

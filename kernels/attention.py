"""Segment attention over two paged pools on a GPU.

Owns how the kernels are launched: block sizes, scratch space. What they compute is
mmserve.kernels.reference's `paged_attention`; which keys every query reads comes as the tables of
mmserve.kernels.work, so one captured launch serves any step. Knows nothing of sequences or
scheduling.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from mmserve.kernels import attention_kernels
from mmserve.kernels.chain import assembly, chained
from mmserve.kernels.kv_formats import KVFormat, Pages
from mmserve.kernels.launch import Launch
from mmserve.kernels.packed_pages import fill_pages
from mmserve.kernels.unpacking import form
from mmserve.kernels.work import ENTRY, HEADER, LARGE, SEGMENT, SMALL, SMALL_ROWS

LOG2_E = 1.4426950408889634

Kinds = tuple[KVFormat, ...]  # of the pools that are read


class Scratch:
    """Room for partial results, shared by all layers: `slots` of them; and how many of a single
    row's have `arrived`, by KV head, which is none between launches."""

    def __init__(self, slots: int, heads: int, dim: int, device: torch.device) -> None:
        self.parts = torch.empty(slots, heads, dim, dtype=torch.float32, device=device)
        self.lses = torch.empty(slots, heads, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(heads, dtype=torch.int32, device=device)


def _tuning_small(few: bool, dim: int, itemsize: int, kinds: Kinds) -> dict[str, int]:
    """Block sizes by measurement on an H200. Of fewer bits a block is soon read, and long computed
    on: what is copied ahead pays, and registers, which more warps at a time would have to share."""
    if dim <= 128 and not all(kind.plain for kind in kinds):
        return {"BLOCK_N": 32, "num_warps": 1, "num_stages": 3 if kinds[0].plain else 5}
    if few and dim <= 128 and itemsize == 2:
        return {"BLOCK_N": 64, "num_warps": 2, "num_stages": 2}
    return {"BLOCK_N": 32, "num_warps": 1 if dim <= 128 else 2, "num_stages": 3}


def _tuning_large(tile_rows: int, dim: int, itemsize: int, kinds: Kinds) -> dict[str, int]:
    """As above. A short tile is two small ones side by side: the same instructions for each row,
    and so the same bits. Of plain pools each has its warps; else rows are more columns of one."""
    if tile_rows < 64:
        small = _tuning_small(False, dim, itemsize, kinds)
        tiles = tile_rows // SMALL_ROWS if all(kind.plain for kind in kinds) else 1
        return small | {"num_warps": small["num_warps"] * tiles}
    narrow = dim > 128 or itemsize > 2
    warps = tile_rows // 16 if dim > 64 else 4
    return {"BLOCK_N": 32 if narrow else 64, "num_warps": warps, "num_stages": 2}


def _kinds(*each: Pages) -> Kinds:
    return tuple(pages.kind for pages in each)


def _pools(*each: Pages) -> tuple[Any, ...]:
    """As kernels take them: keys and values of each, and then what is from head to head."""
    return (*(x for pages in each for x in pages[:2]), *(pages.k.stride(0) for pages in each))


def _shape(q: Tensor, own: Pages, softcap: float | None, sinks: Tensor | None) -> dict[str, Any]:
    """What all kernels that read keys are compiled for."""
    heads, dim = q.shape[1:]
    shape: dict[str, Any] = {"H": heads, "KV_HEADS": own.k.shape[0], "D": dim}
    shape["HALF"] = max(triton.next_power_of_2(dim // 2), 16)
    shape["WIDE"] = max(triton.next_power_of_2(dim), 16)
    shape["PRECISION"] = "ieee" if q.dtype == torch.float32 else "tf32"
    shape |= {"CAP": (softcap or 0.0) * LOG2_E, "HAS_SINKS": sinks is not None}
    return shape | assembly(q.device) | chained(q.device)


def paged_attention(
    q: Tensor,
    work: Tensor,
    own: Pages,
    vision: Pages,
    rope: Tensor,
    scale: float,
    scratch: Scratch,
    out: Tensor,
    launch: Launch,
    *,
    group: int = 0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    full: tuple[Tensor, Tensor] | None = None,
) -> None:
    """A step's attention over one layer's pools; no allocation, no synchronisation.

    q, out [T, H, D]; work: `work.join`'s array on the device, of which the set number `group` is
    the layer's; a head's pages are contiguous in own and vision;
    rope [positions, 2, D / 2] float32: by it queries are turned back before images whose base is
    not None; softcap and sinks [H] as `reference.paged_attention` takes them. `full`: slots and
    `filled` as `fill_pages` takes them; the step reads those pages in the residual still, so they
    are stored beside.
    """
    heads, dim = q.shape[1:]
    shape = _shape(q, own, softcap, sinks)
    header, sunk = work[HEADER * group :], q if sinks is None else sinks
    results, size = (out, scratch.parts, scratch.lses), q.element_size()
    rest, late = own.residual, launch.large > 0
    if launch.large:
        each = (own, vision, own if rest is None else rest)
        forms = {"OWN_FORM": form(own, dim), "VISION_FORM": form(vision, dim)}
        forms["REST_FORM"] = (0, 0, 0) if rest is None else form(rest, dim)
        attention_kernels.attend_many[(launch.large,)](
            work, header, q, *results, *_pools(*each), rope, scale, sunk, BLOCK_M=launch.tile_rows,
            LARGE=LARGE, ENTRY=ENTRY, SEGMENT=SEGMENT, TREES=launch.trees, **forms, **shape,
            **_tuning_large(launch.tile_rows, dim, size, _kinds(*each)),
        )  # fmt: skip
    for text, images, programs in ((rest, rest, launch.newest), (own, vision, launch.small)):
        if text is None or images is None or not programs:
            continue
        # The tensor cores' tiles have 16 rows, and 8 columns, where queries of low bits stand.
        kinds = _kinds(text, images)
        slim = heads <= 8 * own.k.shape[0] and not any(kind.plain for kind in kinds)
        attention_kernels.attend_one[(programs,)](
            work, header, q, *results, *_pools(text, images), rope, scale, sunk, SMALL=SMALL,
            BLOCK_M=SMALL_ROWS // 2 if slim else SMALL_ROWS, OWN_FORM=form(text, dim),
            VISION_FORM=form(images, dim), RESIDUAL=text is rest, LATE=late, **shape,
            **_tuning_small(launch.few, dim, size, kinds),
        )  # fmt: skip
        late = True
    if full is not None:
        fill_pages(own, *full, late=launch.large + launch.newest > 0)
    if launch.merge:
        attention_kernels.merge[(len(q), heads)](
            work, header, *results, sunk, H=heads, D=dim, WIDE=shape["WIDE"], BLOCK_P=launch.merge,
            HAS_SINKS=sinks is not None, num_warps=1 if shape["WIDE"] <= 128 else 2,
            **chained(q.device),
        )  # fmt: skip

"""How keys and values lie in a page: the formats, and what they mean in plain PyTorch.

Owns a page's bytes: packing, scales, outliers. Knows nothing of pools, attention or sequences.

A format that is not plain holds one head's page as one *tile* of bytes, data first, its scales
behind it, so whatever copies pages copies both. What a page gives back is the same whoever reads
it: quantising is part of storing, so a hit and a miss read the same bytes.

A layer's `Pages` are all of a pool's, in one format.

* *bytes* (int8, fp8): every token by itself, one scale a token and head: tokens come one by one.
* *groups* (int4, int2): unsigned levels between a least value and a scale; keys by channel over the
  tokens of a page, values by token over a head's dimensions, as KIVI (arXiv 2402.02750) has them.
  A page is stored whole. With *outliers* the element of each group that lies farthest out is kept
  in 16 bits beside it, and the levels span the others (after KVQuant, arXiv 2401.18079).

Scales are bfloat16, whose range is float32's; bytes' are rounded up, so that nothing is clipped.
Groups' levels span the share of their range that fits them best: in two bits a few far values would
else take the levels from all others. What is stored is quantised by the rounded scales.

Packed dimensions of one byte are a part of the head apart: with int4 d and d + D / 2, with int2 d +
i D / 4, so unpacking gives whole parts, which attention multiplies one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Part = Literal["k", "v"]

GROUP_TOKENS = 64  # of a page whose keys are quantised by channel
WIDE_HEAD = 128  # dimensions from which on each half of a token's values has its own scale
ALIGNMENT = 16  # bytes of a tile
CLIPS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)  # shares of a group's range that its levels may span


@dataclass(frozen=True)
class KVFormat:
    """`bits` of an element, 0: plain, as the model computes. `dtype`: of the elements of bytes."""

    name: str
    bits: int = 0
    dtype: torch.dtype = torch.uint8
    outliers: bool = False

    @property
    def plain(self) -> bool:
        return self.bits == 0

    @property
    def whole_pages(self) -> bool:
        """Whether a page can only be stored as a whole."""
        return 0 < self.bits < 8

    @property
    def parts(self) -> int:
        """Elements of a byte."""
        return 8 // self.bits

    def value_groups(self, dim: int) -> int:
        """Scales of one token's values."""
        return 2 if self.whole_pages and dim >= WIDE_HEAD else 1

    def data_bytes(self, page_size: int, dim: int) -> int:
        return page_size * dim * self.bits // 8

    def tile_bytes(self, page_size: int, dim: int) -> int:
        """One head's page of K, or of V: as much as the larger of them."""
        if not self.whole_pages:
            scales = 2 * page_size
        else:
            most = max(dim, page_size * self.value_groups(dim))
            scales = 4 * most + (3 * most if self.outliers else 0)
        size = self.data_bytes(page_size, dim) + scales
        return -(-size // ALIGNMENT) * ALIGNMENT


PLAIN = KVFormat("auto")
FORMATS = {
    kind.name: kind
    for kind in (
        PLAIN,
        KVFormat("fp8_e4m3", 8, torch.float8_e4m3fn),
        KVFormat("fp8_e5m2", 8, torch.float8_e5m2),
        KVFormat("int8", 8, torch.int8),
        KVFormat("int4", 4),
        KVFormat("int2", 2),
        KVFormat("int4_outliers", 4, outliers=True),
        KVFormat("int2_outliers", 2, outliers=True),
    )
}


class Pages(NamedTuple):
    """One layer's keys and values in a pool: each [Hkv, pages, page_size, D] where the format is
    plain, else uint8 [Hkv, pages, tile]. `page_size`, `dim`: said where tiles do not show them.
    `residual`: where tokens stand whose page is not full yet; None: here, as all do."""

    k: Tensor
    v: Tensor
    kind: KVFormat = PLAIN
    page_size: int = 0
    dim: int = 0
    residual: Pages | None = None

    @property
    def size(self) -> int:
        """Tokens of a page."""
        return self.k.shape[2] if self.kind.plain else self.page_size


def largest(kind: KVFormat) -> float:
    """Of the elements of bytes."""
    return 127.0 if kind.dtype == torch.int8 else float(torch.finfo(kind.dtype).max)


def at_least(x: Tensor) -> Tensor:
    """bfloat16 that is not below x float32, which is finite."""
    near = x.to(torch.bfloat16)
    bits = near.view(torch.int16)
    # The next one up: away from zero, for negative ones towards it.
    higher = torch.where(near > 0, bits + 1, torch.where(near < 0, bits - 1, 1))
    return torch.where(near.float() < x, higher.to(torch.int16), bits).view(torch.bfloat16)


# -- bytes ----------------------------------------------------------------------------------------


def encode_tokens(x: Tensor, kind: KVFormat) -> tuple[Tensor, Tensor]:
    """x [..., D] -> elements uint8 [..., D], scales bfloat16 [...]."""
    x = x.float()
    scale = at_least(x.abs().amax(-1) / largest(kind))
    levels = x / scale.float().clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    if kind.dtype == torch.int8:
        levels = levels.round()
    return levels.to(kind.dtype).view(torch.uint8), scale


def token_views(tiles: Tensor, kind: KVFormat, page_size: int, dim: int) -> tuple[Tensor, Tensor]:
    """Of tiles uint8 [..., pages, tile]: elements [..., pages, page_size, D], and scales bfloat16
    [..., pages, page_size], in place."""
    size = kind.data_bytes(page_size, dim)
    elements = tiles[..., :size].view(*tiles.shape[:-1], page_size, dim)
    return elements, tiles[..., size : size + 2 * page_size].view(torch.bfloat16)


# -- groups ---------------------------------------------------------------------------------------


def encode_pages(x: Tensor, num_tokens: Tensor, kind: KVFormat, part: Part) -> Tensor:
    """x [..., P, D], of which the first num_tokens int64 [...] are tokens -> uint8 [..., tile]."""
    size, dim = x.shape[-2:]
    held = (torch.arange(size, device=x.device) < num_tokens[..., None])[..., None]
    x = torch.where(held, x.float(), 0)
    held = held.expand(x.shape)
    if part == "k":
        groups, known = x.transpose(-1, -2), held.transpose(-1, -2)  # [..., D, P]
    else:
        shape = (size * kind.value_groups(dim), dim // kind.value_groups(dim))
        groups, known = x.reshape(*x.shape[:-2], *shape), held.reshape(*x.shape[:-2], *shape)
    levels, scales, outliers = _quantize(groups, known, kind)
    if part == "k":
        levels = levels.transpose(-1, -2)
    data = _pack(levels.reshape(x.shape), kind).flatten(-2)
    tile = x.new_zeros(*x.shape[:-2], kind.tile_bytes(size, dim), dtype=torch.uint8)
    at = 0
    for piece in (data, scales, *outliers):
        end = at + piece.shape[-1]
        tile[..., at:end] = piece
        at = end
    return tile


def _quantize(
    x: Tensor, known: Tensor, kind: KVFormat
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Groups x [..., G, N], of which `known` count -> levels uint8 [..., G, N], scales as bytes
    [..., 4 G] (G scales, then G least values), of outliers values [..., 2 G], places [..., G]."""
    kept = known
    outliers: tuple[Tensor, ...] = ()
    if kind.outliers:
        count = known.sum(-1, keepdim=True).clamp_min(1)
        mean = torch.where(known, x, 0).sum(-1, keepdim=True) / count
        place = torch.where(known, (x - mean).abs(), -1.0).argmax(-1, keepdim=True)
        value = x.gather(-1, place)[..., 0].to(torch.bfloat16)
        outliers = (_bytes(value), place[..., 0].to(torch.uint8))
        alone = known.sum(-1, keepdim=True) == 1
        kept = known & (alone | ~torch.zeros_like(known).scatter(-1, place, True))
    low = torch.where(kept, x, torch.inf).amin(-1)
    high = torch.where(kept, x, -torch.inf).amax(-1)
    low, high = (torch.where(end.isfinite(), end, 0) for end in (low, high))
    scale, low, levels = _closest(x, kept, low, high, 2**kind.bits - 1)
    scales = torch.cat((_bytes(scale), _bytes(low)), -1)
    return levels.to(torch.uint8), scales, outliers


def _closest(
    x: Tensor, kept: Tensor, low: Tensor, high: Tensor, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Scale and least value bfloat16 [..., G], levels 0..most [..., G, N]: of the CLIPS the one
    whose squared error is least, the widest of those that are equal."""
    found: list[Tensor] = []
    for clip in CLIPS:
        cut = (high - low) * (1 - clip) / 2
        least = -at_least(cut - low).float() + 0.0
        scale = at_least((high - cut - least) / most).float()
        step = scale.clamp_min(torch.finfo(torch.float32).tiny)
        levels = ((x - least[..., None]) / step[..., None]).round().clamp(0, most)
        error = levels * scale[..., None] + least[..., None] - x
        error = torch.where(kept, error, 0).square().sum(-1)
        if not found:
            found = [error, scale, least, levels]
            continue
        better = error < found[0]
        for i, new in enumerate((error, scale, least)):
            found[i] = torch.where(better, new, found[i])
        found[3] = torch.where(better[..., None], levels, found[3])
    return found[1].to(torch.bfloat16), found[2].to(torch.bfloat16), found[3]


def _bytes(x: Tensor) -> Tensor:
    """bfloat16 [..., G] -> uint8 [..., 2 G]."""
    return x.contiguous().view(torch.uint8)


def _pack(levels: Tensor, kind: KVFormat) -> Tensor:
    """uint8 [..., D] -> [..., D / parts]."""
    pieces = levels.chunk(kind.parts, -1)
    packed = torch.zeros_like(pieces[0])
    for i, piece in enumerate(pieces):
        packed |= piece << (i * kind.bits)
    return packed


def decode_pages(tiles: Tensor, kind: KVFormat, part: Part, page_size: int, dim: int) -> Tensor:
    """tiles uint8 [..., tile] -> float32 [..., page_size, D]."""
    if not kind.whole_pages:
        elements, scales = token_views(tiles, kind, page_size, dim)
        return elements.contiguous().view(kind.dtype).float() * scales.float()[..., None]
    size = kind.data_bytes(page_size, dim)
    packed = tiles[..., :size].view(*tiles.shape[:-1], page_size, dim // kind.parts)
    mask = 2**kind.bits - 1
    pieces = [packed >> (i * kind.bits) & mask for i in range(kind.parts)]
    levels = torch.cat(pieces, -1).float()
    groups = dim if part == "k" else page_size * kind.value_groups(dim)
    scale, low = (
        tiles[..., at : at + 2 * groups].view(torch.bfloat16).float()
        for at in (size, size + 2 * groups)
    )
    levels = levels.transpose(-1, -2) if part == "k" else levels
    each = page_size * dim // groups
    found = levels.reshape(*scale.shape, each) * scale[..., None] + low[..., None]
    if kind.outliers:
        at = size + 4 * groups
        value = tiles[..., at : at + 2 * groups].view(torch.bfloat16).float()
        place = tiles[..., at + 2 * groups : at + 3 * groups].long()
        found = found.scatter(-1, place[..., None], value[..., None])
    if part == "k":
        return found.transpose(-1, -2)
    return found.reshape(*found.shape[:-2], page_size, dim)

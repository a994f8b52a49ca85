"""Feature maps to a fixed number of latents: the Perceiver-style compressor.

Owns how features become tokens, the cross-attention blocks and the projection into the language
model's embedding space. Knows nothing of pixels, towers or text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Source:
    """One feature map of a level: its index, channels, and how far space folds into channels."""

    feature: int
    channels: int
    unshuffle: int = 1


@dataclass(frozen=True)
class CompressorConfig:
    """`levels` maps a stride in pixels to the feature maps joined there, finest first."""

    image_size: int  # pixels
    levels: Mapping[int, tuple[Source, ...]]
    width: int
    heads: int
    layers: int
    latent_grid: tuple[int, int]  # rows, columns over the image
    local_sigmas: tuple[float, ...]  # image sides; one a head, the other heads see everywhere
    hidden_size: int  # of the language model
    # So many of the first latents say what all say, the more the finer; empty: only all of them do.
    nested: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that do not grow from one to all latents."""
        sizes = [0, *self.nested]
        grows = sizes == sorted({*sizes}) and sizes[-1] == self.num_latents
        if self.nested and not grows:
            raise ValueError(
                f"nested latents {list(self.nested)} do not grow up to all {self.num_latents}"
            )

    @property
    def num_latents(self) -> int:
        return self.latent_grid[0] * self.latent_grid[1]

    @property
    def grids(self) -> list[int]:
        """Tokens a side, of each level."""
        return [self.image_size // stride for stride in self.levels]


class PerceiverCompressor(nn.Module):
    """Latents on a grid over the image read [feature tokens, latents], layer by layer.

    The first heads carry a fixed Gaussian bias towards their latent's grid point, so that a latent
    keeps to its place while the other heads look everywhere.
    """

    bias: Tensor

    def __init__(self, config: CompressorConfig) -> None:
        super().__init__()
        self._levels = dict(config.levels)
        width = config.width
        for stride, sources in self._levels.items():
            channels = sum(s.channels * s.unshuffle**2 for s in sources)
            self.add_module(f"ln{stride}", nn.LayerNorm(channels))
            self.add_module(f"in{stride}", nn.Linear(channels, width))
        self.pos = nn.Parameter(torch.zeros(sum(n * n for n in config.grids), width))
        self.latents = nn.Parameter(torch.zeros(config.num_latents, width))
        self.blocks = nn.ModuleList(CrossBlock(width, config.heads) for _ in range(config.layers))
        self.ln = nn.LayerNorm(width)
        self.proj = nn.Linear(width, config.hidden_size)
        self.register_buffer("bias", local_bias(config), persistent=False)

    def tokens(self, features: list[Tensor]) -> Tensor:
        """Feature maps [N, C, h, w] -> tokens [N, num_tokens, width], coarse levels last."""
        out = []
        for stride, sources in self._levels.items():
            maps = [F.pixel_unshuffle(features[s.feature], s.unshuffle) for s in sources]
            joined = torch.cat(maps, 1).flatten(2).transpose(1, 2)
            norm, enter = self.get_submodule(f"ln{stride}"), self.get_submodule(f"in{stride}")
            out.append(enter(norm(joined)))
        return torch.cat(out, 1)

    def forward(self, features: list[Tensor]) -> Tensor:
        """Feature maps, each [N, C, h, w] -> [N, num_latents, hidden_size]."""
        tokens = self.tokens(features) + self.pos
        x = self.latents.expand(len(tokens), -1, -1)
        for block in self.blocks:
            x = block(x, tokens, self.bias)
        out: Tensor = self.proj(self.ln(x))
        return out


class CrossBlock(nn.Module):
    """A pre-norm block whose queries attend to [tokens, queries]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_kv, self.ln_2 = (nn.LayerNorm(width) for _ in range(3))
        self.attn = Attention(width, heads)
        self.mlp = MLP(width)

    def forward(self, x: Tensor, tokens: Tensor, bias: Tensor) -> Tensor:
        """x [N, q, width]; tokens [N, k, width]; bias [1, heads, q, k + q]."""
        y = self.ln_1(x)
        x = x + self.attn(y, torch.cat([self.ln_kv(tokens), y], 1), bias)
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class Attention(nn.Module):
    """Multi-head attention with an additive bias; parameters named as nn.MultiheadAttention's.

    PyTorch's own module would need the bias repeated for every image and head.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.in_proj_weight = nn.Parameter(torch.zeros(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, queries: Tensor, keys: Tensor, bias: Tensor) -> Tensor:
        """queries [N, q, width]; keys [N, k, width] -> [N, q, width]."""
        width = queries.shape[-1]
        weight, bias_qkv = self.in_proj_weight, self.in_proj_bias
        q = F.linear(queries, weight[:width], bias_qkv[:width])
        k, v = F.linear(keys, weight[width:], bias_qkv[width:]).chunk(2, -1)
        q, k, v = (t.view(*t.shape[:2], self._heads, -1).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        projected: Tensor = self.out_proj(out.transpose(1, 2).flatten(2))
        return projected


class MLP(nn.Sequential):
    """Names as in open_clip's blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * width, width)


def local_bias(config: CompressorConfig) -> Tensor:
    """The fixed attention bias: float32 [1, heads, num_latents, num_tokens + num_latents]."""
    latents = latent_places(config)
    tokens = torch.cat([cell_centres(n, n) for n in config.grids])
    distance = torch.cdist(latents, tokens).pow(2)
    heads = [-distance / (2 * sigma * sigma) for sigma in config.local_sigmas]
    heads += [torch.zeros_like(distance)] * (config.heads - len(heads))
    to_latents = torch.zeros(config.heads, config.num_latents, config.num_latents)
    return torch.cat([torch.stack(heads), to_latents], 2)[None]


def latent_places(config: CompressorConfig) -> Tensor:
    """(x, y) of each latent in the unit square: float32 [num_latents, 2]. Nested ones are in an
    order in which the first few lie all over the image."""
    places = cell_centres(*config.latent_grid)
    return places[spread(*config.latent_grid)] if config.nested else places


def spread(rows: int, columns: int) -> list[int]:
    """A grid's cells as ordered dithering takes them: each half fills the gaps of the one before.

    Cells are numbered row by row. Of 8 x 8, the first 4 are a grid of 2 x 2 and the first 16 one of
    4 x 4; the first 8 and 32 are chequered.
    """
    bits = range(max(rows, columns).bit_length())

    def turn(cell: int) -> list[tuple[int, int]]:
        row, column = divmod(cell, columns)
        return [((row ^ column) >> bit & 1, row >> bit & 1) for bit in bits]

    return sorted(range(rows * columns), key=turn)


def cell_centres(rows: int, columns: int) -> Tensor:
    """(x, y) of each cell's centre in the unit square, row by row: float32 [rows * columns, 2]."""
    y = (torch.arange(rows) + 0.5) / rows
    x = (torch.arange(columns) + 0.5) / columns
    grid_y, grid_x = torch.meshgrid(y, x, indexing="ij")
    return torch.stack([grid_x, grid_y], -1).view(-1, 2)

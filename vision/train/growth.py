"""A trained compressor with more latents than it has had, each beginning as its nearest neighbour.

Owns what becomes of the latents; all other weights are taken as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from mmserve.vision.perceiver import CompressorConfig, latent_places

LATENTS = "resampler.latents"
PULL = 0.5  # how loud a latent's own place is in it


def grown(
    tensors: Mapping[str, Tensor], before: CompressorConfig, after: CompressorConfig
) -> dict[str, Tensor]:
    """The vision model's tensors for `after`, which differs from `before` in its latents alone."""
    old, new = latent_places(before), latent_places(after)
    if old.shape == new.shape and torch.equal(old, new):
        return dict(tensors)
    nearest = torch.cdist(new, old).argmin(1)
    latents = tensors[LATENTS].float()
    moved = place_code(new, before.width) - place_code(old[nearest], before.width)
    return {**tensors, LATENTS: latents[nearest] + PULL * moved}


def place_code(places: Tensor, width: int) -> Tensor:
    """Sines and cosines of points in the unit square: [n, 2] -> [n, width]."""
    frequencies = math.pi * 2 ** torch.linspace(0, 5, width // 4)
    waves = [places[:, i : i + 1] * frequencies for i in (0, 1)]
    return torch.cat([f(wave) for wave in waves for f in (torch.sin, torch.cos)], 1)

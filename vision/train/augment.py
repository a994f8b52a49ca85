"""Small changes to pictures that leave every answer true: light, colour, blur, noise and margins.

Owns their sizes. On the device, a batch at a time; knows nothing of what is in a picture.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST = 0.88  # of a picture's side that it may shrink to, somewhere within its frame
SHRUNK, BLURRED, NOISY = 0.5, 0.15, 0.3  # shares of pictures
LIGHT, COLOUR = 0.06, 0.03  # of full scale
NOISE = 9.0  # levels of 255, at most


def augment(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """uint8 [N, 3, H, W] -> float32 of 0 to 255. `generator`: of the device of `pixels`."""
    count = len(pixels)

    def chance(*shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=generator, device=pixels.device)

    size = torch.where(chance() < SHRUNK, LEAST + (1 - LEAST) * chance(), 1.0)
    shift = (2 * chance(2) - 1) * (1 - size)[:, None]
    turn = torch.zeros(count, 2, 3, device=pixels.device)
    turn[:, 0, 0] = turn[:, 1, 1] = 1 / size
    turn[:, :, 2] = -shift / size[:, None]
    grid = F.affine_grid(turn, list(pixels.shape), align_corners=False)
    x = F.grid_sample(pixels.float(), grid, padding_mode="border", align_corners=False)
    x = x * (1 + LIGHT * (2 * chance(1, 1, 1) - 1)) * (1 + COLOUR * (2 * chance(3, 1, 1) - 1))
    x = x + 255 * COLOUR * (2 * chance(1, 1, 1) - 1)
    blurred = F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)
    x = torch.where(chance(1, 1, 1) < BLURRED, blurred, x)
    noise = torch.randn(x.shape, generator=generator, device=x.device)
    x = x + noise * (NOISE * chance(1, 1, 1) * (chance(1, 1, 1) < NOISY))
    return x.clamp(0, 255)

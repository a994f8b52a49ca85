"""How long one image takes from pixels to visual tokens, on two cores of the CPU.

Owns the threads and the repeats. Measures the weights alone, without the server around them.
"""

from __future__ import annotations

import dataclasses
import statistics
import time

import torch

from mmserve.config import ModelConfig
from mmserve.model.loader import load_model

THREADS = 2
REPEATS = 40


@torch.inference_mode()
def milliseconds(config: ModelConfig) -> float:
    """The median of the repeats, after a few to warm up."""
    vision = load_model(dataclasses.replace(config, device="cpu"), progress=False).vision
    side = vision.config.image_size
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (1, 3, side, side), generator=generator, dtype=torch.uint8)
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        times = []
        for _ in range(REPEATS + 3):
            started = time.perf_counter()
            vision.encode(pixels)
            times.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(before)
    return 1e3 * statistics.median(times[3:])

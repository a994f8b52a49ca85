"""What a device can do at best, measured in the run that is compared with it.

Owns the two ceilings and how work on a device is timed. Knows nothing of models.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

GIB = 1024**3


@dataclass(frozen=True)
class Probe:
    """How much is copied and multiplied to find the ceilings."""

    copy_bytes: int
    matrix: int  # rows and columns
    repeats: int


GPU_PROBE = Probe(copy_bytes=4 * GIB, matrix=8192, repeats=20)
CPU_PROBE = Probe(copy_bytes=GIB // 4, matrix=2048, repeats=5)


@dataclass(frozen=True)
class Ceilings:
    bytes_per_s: float  # read and written by a copy
    flops_per_s: float  # of a square product in the dtype weights have


def usual_dtype(device: torch.device) -> torch.dtype:
    """What models run in there."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(
    work: Callable[[], object], device: torch.device, *, repeats: int, warm_up: int = 3
) -> float:
    """Seconds of one call: CUDA events on a GPU, so the launch is not counted; else the clock."""
    for _ in range(warm_up):
        work()
    synchronize(device)
    if device.type != "cuda":
        return statistics.median(_clocked(work) for _ in range(repeats))
    event: Any = torch.cuda.Event
    marks = [event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    synchronize(device)
    pairs = zip(marks, marks[1:], strict=False)
    return float(statistics.median(begin.elapsed_time(end) for begin, end in pairs)) / 1e3


def measure_ceilings(
    device: torch.device, dtype: torch.dtype, probe: Probe | None = None
) -> Ceilings:
    """`dtype` is the product's. `probe` None: one that suits the kind of device."""
    probe = probe or (GPU_PROBE if device.type == "cuda" else CPU_PROBE)
    ceilings = Ceilings(_copy_rate(device, probe), _product_rate(device, dtype, probe))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return ceilings


def _copy_rate(device: torch.device, probe: Probe) -> float:
    source = torch.zeros(probe.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = median_seconds(lambda: target.copy_(source), device, repeats=probe.repeats)
    return 2 * probe.copy_bytes / seconds


def _product_rate(device: torch.device, dtype: torch.dtype, probe: Probe) -> float:
    n = probe.matrix
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty(n, n, device=device, dtype=dtype)
    seconds = median_seconds(lambda: torch.mm(a, b, out=out), device, repeats=probe.repeats)
    return float(2 * n**3 / seconds)


def _clocked(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started

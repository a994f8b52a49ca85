"""What a figure was measured on, and the ceiling memory sets.

Owns the facts beside every run: code, machine, libraries, measured bandwidth. Knows nothing of
workloads.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from mmserve import __version__

BUFFER_BYTES = 256 * 1024**2


@dataclass(frozen=True)
class Facts:
    commit: str
    device: str
    cores: int  # this process may use
    threads: int
    python: str
    torch: str
    transformers: str
    load: float  # runnable processes, mean of the minute before


@dataclass(frozen=True)
class Footprint:
    """Bytes a decode step must read: all weights once, each token of context once."""

    weight_bytes: int
    kv_bytes_per_token: int

    def bound(self, bytes_per_s: float, streams: int, context: float) -> float:
        """Tokens/s of each of `streams` sequences of `context` tokens that memory allows."""
        return bytes_per_s / (self.weight_bytes + streams * context * self.kv_bytes_per_token)


def facts(device: torch.device) -> Facts:
    return Facts(
        commit=commit(),
        device=_gpu(device) if device.type == "cuda" else _cpu(),
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        load=os.getloadavg()[0],
    )


def commit() -> str:
    """The commit of this source, `+dirty` where changed; the version where there is no git."""
    here = Path(__file__).resolve()
    try:
        _git(here.parent, "ls-files", "--error-unmatch", here.name)
        name = _git(here.parent, "rev-parse", "--short=12", "HEAD")
        changed = _git(here.parent, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return f"mmserve {__version__}"
    return f"{name}+dirty" if changed else name


def _git(folder: Path, *words: str) -> str:
    command = ("git", "-C", str(folder), *words)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = [line.partition(":") for line in lines]
    found = {name.strip(): value.strip() for name, _, value in reversed(fields)}
    family = f"family {found.get('cpu family', '?')} model {found.get('model', '?')}"
    return f"{found.get('model name', platform.machine())} ({family})"


def _gpu(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


class Neighbours:
    """What other processes take of the CPUs from now on: figures mean little where that is much."""

    def __init__(self) -> None:
        self._start = self._now()

    def share(self) -> float | None:
        """0 to 1 of all cores, since this object was made; None where the system does not say."""
        end, start = self._now(), self._start
        if end is None or start is None:
            return None
        wall, busy, own = (b - a for a, b in zip(start, end, strict=True))
        return max(busy - own, 0.0) / (wall * (os.cpu_count() or 1)) if wall else 0.0

    def _now(self) -> tuple[float, float, float] | None:
        """Seconds: wall, all cores' work of all processes, this process's."""
        try:
            line = Path("/proc/stat").read_text().splitlines()[0]
        except OSError:
            return None
        user, nice, system, _idle, _wait, irq, soft, steal = map(int, line.split()[1:9])
        ticks = user + nice + system + irq + soft + steal
        return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time()


def read_bandwidth(device: torch.device, repeats: int = 5) -> float:
    """Bytes/s of the better of summing and copying a 256 MB buffer, best of `repeats`.

    A cache larger than the buffer would serve it, as it would serve weights of that size.
    """
    source = torch.ones(BUFFER_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)

    def rate(work: Callable[[], object], moved: int) -> float:
        best = 0.0
        for _ in range(repeats + 1):  # the first one touches the pages
            started = time.perf_counter()
            work()
            _wait(device)
            best = max(best, moved / (time.perf_counter() - started))
        return best

    return max(rate(source.sum, BUFFER_BYTES), rate(lambda: target.copy_(source), 2 * BUFFER_BYTES))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""How much memory is free, and a refusal in numbers when a model needs more.

Owns where the figure comes from on a CPU and a GPU. Knows nothing of models.
"""

from __future__ import annotations

from pathlib import Path

import torch

from mmserve.model.fetch import ModelUnavailableError

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    figures = [f for f in (_available(_MEMINFO), _left_in_cgroup(_CGROUP)) if f is not None]
    return min(figures, default=None)


def require(what: str, parts: dict[str, int], device: torch.device, free: int | None) -> None:
    """Raises `ModelUnavailableError` when the `parts` (bytes by name) are more than is free."""
    need = sum(parts.values())
    if free is None or need <= free:
        return
    listed = " + ".join(f"{size / 1e9:.2f} GB of {name}" for name, size in parts.items())
    raise ModelUnavailableError(
        f"{what} does not fit into memory: it needs {listed}, and {free / 1e9:.2f} GB are free on "
        f"{device}"
    )


def _available(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _left_in_cgroup(cgroup: Path) -> int | None:
    """What a container's own limit leaves; its page cache can be given back and counts as free."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        stat = (line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        cached = sum(int(n) for name, n in stat if name in ("active_file", "inactive_file"))
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used + cached)

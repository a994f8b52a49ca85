"""Whether the host has memory left for new work.

Owns the share in use, as the machine and the container around this process count it, and the bound
above which new work is refused. Knows nothing of what could be given back.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil

from mmserve.server.errors import HostMemoryLowError

EASE = 0.02  # share below the limit before new work is taken again, so that it does not flutter
CGROUP = Path("/sys/fs/cgroup")


def used_share(cgroup: Path = CGROUP) -> float:
    """Of the machine's memory or the container's, whichever is nearer to its end; what the system
    could take back at once counts as free."""
    machine = psutil.virtual_memory()
    return float(max(1 - machine.available / machine.total, _container_share(cgroup)))


def _container_share(cgroup: Path) -> float:
    """By control groups of version 2; 0 where there is no such limit."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        stat = (cgroup / "memory.stat").read_text().split()
    except (OSError, ValueError):
        return 0.0
    files = dict(zip(stat[::2], stat[1::2], strict=True)).get("inactive_file", "0")
    return 0.0 if limit == "max" else (used - int(files)) / int(limit)


class MemoryGuard:
    """`limit`: a share, 0 for none; `read`: the share in use."""

    def __init__(self, limit: float, read: Callable[[], float] = used_share) -> None:
        self._limit, self._read = limit, read
        self._share = 0.0
        self._is_low = False

    def look(self) -> bool:
        """Read the share; whether something should be given back."""
        if not self._limit:
            return False
        self._share = self._read()
        self._is_low = self._share > self._limit - (EASE if self._is_low else 0.0)
        return self._is_low

    def check(self) -> None:
        """Raises `HostMemoryLowError`."""
        if self._is_low:
            raise HostMemoryLowError(
                f"{self._share:.1%} of the host's memory are in use; above {self._limit:.1%} the "
                "server takes no new work."
            )

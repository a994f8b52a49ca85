"""Numbered folders, each for one process at a time, found again by whichever comes next.

Owns which is free. Knows nothing of what is kept there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def own_place(folder: Path) -> Iterator[Path]:
    """The first folder in `folder` that no process has, had until the end."""
    for number in count():
        place = folder / str(number)
        place.mkdir(parents=True, exist_ok=True)
        lock = FileLock(place / "lock", thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        try:
            yield place
        finally:
            lock.release()
        return

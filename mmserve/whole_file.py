"""Files that are there whole or not at all, whenever the process or the machine stops.

Owns how one is written. Knows nothing of what is in it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PART = ".part"  # the end of a name whose file is not whole yet


@contextmanager
def replacing(path: Path, *, lasts: bool = True) -> Iterator[Path]:
    """A file in the same folder to write to, which then takes the name, or goes.

    `lasts`: once this has ended, a power cut loses it no more. Raises OSError.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=PART, dir=path.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        if lasts:
            _sync(part, os.O_RDWR)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    if lasts and os.name == "posix":  # the name must last, too
        _sync(path.parent, os.O_RDONLY)


def _sync(path: Path, mode: int) -> None:
    handle = os.open(path, mode)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

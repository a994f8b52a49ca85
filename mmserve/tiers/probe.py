"""What a folder's disk can give, measured once.

Owns the measurement. Knows nothing of objects.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from mmserve.whole_file import PART

PROBE_BYTES = 8 << 20


def disk_byte_s(folder: Path) -> float | None:
    """Seconds that a byte takes from a folder's disk; None where nothing can be written.

    The system is asked to forget what it has just written, or it would be its memory that is
    measured.
    """
    path = folder / f".probe{PART}"
    try:
        with open(path, "wb", buffering=0) as file:
            file.write(os.urandom(PROBE_BYTES))
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        size = len(path.read_bytes())
        return (time.perf_counter() - started) / size
    except OSError:
        return None
    finally:
        path.unlink(missing_ok=True)

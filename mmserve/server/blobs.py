"""Encoded image and file bytes, kept once by content.

`BlobStore` owns a folder: each distinct content is one file, shared by everyone who holds its
`Blob`, and gone when the last holder is. Bytes in memory are never kept for it. `MemoryBlob` is for
what must never touch the disk. Knows nothing of images, responses or uploads.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import tempfile
import weakref
from pathlib import Path
from typing import Protocol


class Blob(Protocol):
    """Bytes that can be asked for again; `digest` is their SHA-256."""

    @property
    def digest(self) -> bytes: ...
    @property
    def size(self) -> int: ...
    async def read(self) -> bytes: ...


class MemoryBlob:
    """Bytes that live as long as this object."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.digest = hashlib.sha256(data).digest()
        self.size = len(data)

    async def read(self) -> bytes:
        return self._data


class DiskBlob:
    """Bytes in a file that lives as long as this object."""

    def __init__(self, path: Path, digest: bytes, size: int) -> None:
        self._path = path
        self.digest = digest
        self.size = size

    async def read(self) -> bytes:
        return await asyncio.to_thread(self._path.read_bytes)


class BlobStore:
    """Content-addressed files in a private folder, used from one event loop.

    A temporary folder is made (and removed by `close`) where none is given.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._temporary = (
            tempfile.TemporaryDirectory(prefix="mmserve-", ignore_cleanup_errors=True)
            if folder is None
            else None
        )
        self._folder = Path(self._temporary.name) if self._temporary else folder
        self._blobs: weakref.WeakValueDictionary[bytes, DiskBlob] = weakref.WeakValueDictionary()
        self._serial = itertools.count()
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._blobs)

    async def put(self, data: bytes) -> DiskBlob:
        """The blob of these bytes, written unless it is held already."""
        digest = await asyncio.to_thread(lambda: hashlib.sha256(data).digest())
        known = self._blobs.get(digest)
        if known is not None:
            return known
        assert self._folder is not None
        # The serial keeps a late removal of an old file from hitting a new one of equal content.
        path = self._folder / f"{digest.hex()}.{next(self._serial)}"
        await asyncio.to_thread(path.write_bytes, data)
        known = self._blobs.get(digest)
        if known is not None:  # somebody wrote the same while we did
            path.unlink(missing_ok=True)
            return known
        blob = DiskBlob(path, digest, len(data))
        self._blobs[digest] = blob
        self.used_bytes += blob.size
        weakref.finalize(blob, self._drop, path, blob.size)
        return blob

    def _drop(self, path: Path, size: int) -> None:
        self.used_bytes -= size
        path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove a temporary folder and all in it."""
        if self._temporary is not None:
            self._temporary.cleanup()

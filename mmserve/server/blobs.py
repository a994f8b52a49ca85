"""Encoded image and file bytes, kept once by content.

`BlobStore` owns a folder: each distinct content is one file, shared by all of one salt who hold its
`Blob`, and gone when the last holder is. Bytes in memory are never kept for it. In a folder that
was given, files outlive the process: they are written whole or not at all. `MemoryBlob` is for what
must never touch the disk. Knows nothing of images, responses or uploads.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import tempfile
import time
import weakref
from pathlib import Path
from typing import Protocol

from mmserve.faults import NO_FAULTS, Faults
from mmserve.server.errors import StorageUnavailableError
from mmserve.server.journal import Journal, NoJournal
from mmserve.whole_file import PART, replacing


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
        self.path = path
        self.digest = digest
        self.size = size

    async def read(self) -> bytes:
        return await asyncio.to_thread(self.path.read_bytes)


def _digest(path: Path) -> bytes | None:
    """Of what is in a file of ours, by its name; None: it is no whole one."""
    name = path.name.partition(".")[0]
    return bytes.fromhex(name) if path.suffix != PART and len(name) == 64 else None


class BlobStore:
    """Content-addressed files in a private folder, used from one event loop.

    A temporary folder is made (and removed by `close`) where none is given. In a given one, files
    are removed between `open` and `close` only, so that the end of a process removes none, and
    after what the `journal` was told before: no row may name a file that is gone. A `shared` folder
    has other servers' files, too, so that none is removed for want of a holder here.
    """

    def __init__(
        self,
        folder: Path | None = None,
        journal: Journal | None = None,
        faults: Faults = NO_FAULTS,
        *,
        shared: bool = False,
    ) -> None:
        self._shared = shared
        self._faults = faults
        self._journal = journal or NoJournal()
        self._loop: asyncio.AbstractEventLoop | None = None  # of a given folder, between those
        self._temporary = (
            tempfile.TemporaryDirectory(prefix="mmserve-", ignore_cleanup_errors=True)
            if folder is None
            else None
        )
        self._folder = Path(self._temporary.name) if self._temporary else folder
        self._blobs: weakref.WeakValueDictionary[bytes, DiskBlob] = weakref.WeakValueDictionary()
        self._found: dict[bytes, Path] = {}  # of an earlier process
        self.used_bytes = 0
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._found = {} if shared else self.lying()

    def __len__(self) -> int:
        return len(self._blobs)

    def lying(self) -> dict[bytes, Path]:
        """The files in the folder, by the digests of what is in them."""
        assert self._folder is not None
        found = ((path, _digest(path)) for path in self._folder.iterdir())
        return {digest: path for path, digest in found if digest is not None}

    def find(self, digest: bytes, lying: dict[bytes, Path] | None = None) -> DiskBlob:
        """The blob that an earlier process kept, before `open` only; or one of what is `lying`
        there now. Raises KeyError."""
        known = self._blobs.get(digest)
        if known is None:
            path = (self._found if lying is None else lying)[digest]
            known = self._register(path, digest, path.stat().st_size)
        return known

    def open(self) -> None:
        """Begin to remove what nobody holds, first of all what was found and not asked for."""
        assert self._folder is not None
        if self._temporary is None and not self._shared:
            held = {blob.path for blob in self._blobs.values()}
            for path in set(self._folder.iterdir()) - held:
                path.unlink(missing_ok=True)
            self._loop = asyncio.get_running_loop()
        self._found.clear()

    def touch(self) -> None:
        """Say to other servers that what this one holds is held."""
        for blob in list(self._blobs.values()):
            with contextlib.suppress(OSError):
                os.utime(blob.path)

    def untouched(self, seconds: float) -> list[tuple[Path, bytes | None]]:
        """Files that no server has touched or written for so long; whole ones with digests."""
        assert self._folder is not None
        found = []
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):  # gone meanwhile
                if path.stat().st_mtime + seconds < time.time():
                    found.append((path, _digest(path)))
        return found

    async def put(self, data: bytes, salt: bytes = b"") -> DiskBlob:
        """The blob of these bytes, written unless it is held already under the same salt: that
        takes less time, which is to tell nobody what others hold.

        Raises `StorageUnavailableError`.
        """
        digest = await asyncio.to_thread(lambda: hashlib.sha256(data).digest())
        known = self._blobs.get(digest + salt)
        if known is not None:
            return known
        assert self._folder is not None
        # A late removal of an old file must not hit a new one of equal content.
        path = self._folder / f"{digest.hex()}.{secrets.token_hex(8)}"
        try:
            await asyncio.to_thread(self._write, path, data)
        except OSError as error:
            raise StorageUnavailableError(f"It cannot be stored: {error.strerror}.") from error
        known = self._blobs.get(digest + salt)
        if known is not None:  # somebody wrote the same while we did
            path.unlink(missing_ok=True)
            return known
        return self._register(path, digest, len(data), salt)

    def _write(self, path: Path, data: bytes) -> None:
        self._faults.at("blob.write")
        with replacing(path, lasts=self._temporary is None) as part:
            part.write_bytes(data)

    def _register(self, path: Path, digest: bytes, size: int, salt: bytes = b"") -> DiskBlob:
        blob = DiskBlob(path, digest, size)
        self._blobs[digest + salt] = blob
        self.used_bytes += size
        weakref.finalize(blob, self._drop, path, size).atexit = False
        return blob

    def _drop(self, path: Path, size: int) -> None:
        # On any thread: whichever let go last, or collects garbage.
        self.used_bytes -= size
        if self._temporary is not None:
            path.unlink(missing_ok=True)
        elif self._loop is not None and not self._shared:
            self._loop.call_soon_threadsafe(self._remove, path)

    def _remove(self, path: Path) -> None:
        if self._loop is not None:
            self._journal.after(lambda: path.unlink(missing_ok=True))

    def close(self) -> None:
        """Remove a temporary folder and all in it; leave any other as it is."""
        self._loop = None
        if self._temporary is not None:
            self._temporary.cleanup()

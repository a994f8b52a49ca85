"""Objects in a folder: one file each, whole or not at all, oldest use first to go.

Owns the folder. Knows nothing of pools, threads or other tiers; whoever calls says from where, and
its methods that read and write files may run on any thread at once.
"""

from __future__ import annotations

import os
from pathlib import Path

from mmserve.kvfile.header import KVFileError
from mmserve.tiers.kv_object import KVObject, Owner, header_length, open_header
from mmserve.whole_file import PART, replacing

END = ".kv"


def file_name(name: bytes) -> str:
    return name.hex() + END


def name_of(file_name: str) -> bytes | None:
    """What a file of ours is called for; None for others'."""
    try:
        return bytes.fromhex(file_name.removesuffix(END))
    except ValueError:
        return None


def scan(folder: Path) -> list[tuple[bytes, int]]:
    """Names and bytes of what is there, the last used last; parts of files go. Contents are looked
    at when they are read. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(PART):
                Path(entry.path).unlink(missing_ok=True)
            elif entry.name.endswith(END) and (name := name_of(entry.name)):
                known = entry.stat()
                found.append((known.st_mtime_ns, name, known.st_size))
    return [(name, size) for _, name, size in sorted(found)]


class Folder:
    def __init__(self, path: Path, owner: Owner, *, pinned: bool) -> None:
        self.path, self._owner, self._pinned = path, owner, pinned

    def write(self, item: KVObject, header: bytes) -> None:
        """It need not last over a power cut: its checksum tells. Raises `OSError`."""
        with replacing(self.path / file_name(item.name), lasts=False) as part:
            with open(part, "wb", buffering=0) as file:
                _write_all(file.fileno(), header)
                _write_all(file.fileno(), item.memory.numpy().data)

    def read(self, name: bytes) -> KVObject:
        """Raises `KVFileError` for what is damaged or another model's, or `OSError`."""
        with open(self.path / file_name(name), "rb", buffering=0) as file:
            length = header_length(start := file.read(8))
            opened = open_header(self._owner, name, start + file.read(length - 8))
            if os.fstat(file.fileno()).st_size != length + opened.num_bytes:
                raise KVFileError(f"object {name.hex()} is cut, or longer than it says")
            return opened.read(
                lambda part, start: os.preadv(file.fileno(), [part], length + start),
                pinned=self._pinned,
            )

    def bytes_of(self, name: bytes) -> bytes:
        """The whole file as it is. Raises `OSError`."""
        return (self.path / file_name(name)).read_bytes()

    def delete(self, name: bytes) -> None:
        (self.path / file_name(name)).unlink(missing_ok=True)

    def touch(self, name: bytes) -> None:
        """It is used now, also for the next process."""
        try:
            os.utime(self.path / file_name(name))
        except OSError:
            pass  # it has just gone, or the folder is read-only


def from_bytes(owner: Owner, name: bytes, data: bytes | memoryview, *, pinned: bool) -> KVObject:
    """An object from its whole file. Raises `KVFileError`."""
    view = memoryview(data)
    length = header_length(bytes(view[:8]))
    opened = open_header(owner, name, bytes(view[:length]))
    if len(view) != length + opened.num_bytes:
        raise KVFileError(f"object {name.hex()} is cut, or longer than it says")

    def fill(part: memoryview, start: int) -> int:
        part[:] = view[length + start : length + start + len(part)]
        return len(part)

    return opened.read(fill, pinned=pinned)


def _write_all(handle: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(handle, left) :]

"""The tiers below a GPU's pools, one under another: host memory, a folder, an object store.

Owns what is where, the threads that move it, and their queue. Knows nothing of pools, sequences or
what is in an object. What leaves a tier for want of room goes to the next one, if there is one and
it is not there already; what cannot be read whole is forgotten there and counted.

One thread puts and asks (the engine's); one writes downwards, a few read upwards. Nobody waits for
a file but these: where the writer is behind by `QUEUE_BYTES`, what falls out is gone instead.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, Protocol

from mmserve.faults import NO_FAULTS, Faults
from mmserve.kvfile.header import KVFileError, KVMismatchError
from mmserve.tiers.books import Ledger
from mmserve.tiers.disk import Folder, from_bytes, scan
from mmserve.tiers.host_memory import MOST_READY, Reserve
from mmserve.tiers.kv_object import KVObject, Owner, header_of
from mmserve.tiers.object_store import ObjectStore, StoredObjectError

logger = logging.getLogger(__name__)

Tier = Literal["host", "disk", "object_store"]
TIERS: tuple[Tier, ...] = ("host", "disk", "object_store")
Direction = Literal["down", "up"]

QUEUE_BYTES = 1 << 30
READERS = 8  # threads; a fast disk needs several reads at once


class Watch(Protocol):
    """Is told on any thread."""

    def moved(self, tier: Tier, direction: Direction, num_bytes: int) -> None:
        """To a tier, or from it."""

    def refused(self, reason: str) -> None:
        """damaged | other_model | unreadable | unwritable | queue_full: an object is lost."""


class Fetch:
    """Objects on their way up. How many have ended, well or not, may be asked at any time; what is
    there then is `got`."""

    def __init__(self, reads: dict[bytes, Future[KVObject | None]]) -> None:
        self._reads, self._total = reads, len(reads)
        self.num_ended = 0
        self._lock, self._ended = threading.Lock(), threading.Event()
        for read in reads.values():
            read.add_done_callback(self._count)

    def _count(self, _: Future[KVObject | None]) -> None:
        with self._lock:
            self.num_ended += 1
        if self.num_ended == self._total:
            self._ended.set()

    @property
    def finished(self) -> bool:
        return self._ended.is_set()

    def got(self, name: bytes) -> KVObject | None:
        read = self._reads.get(name)
        return read.result() if read is not None and _succeeded(read) else None

    def drop(self, name: bytes) -> None:
        """An object that has come is no longer wanted."""
        self._reads.pop(name, None)

    def wait(self, seconds: float) -> None:
        """Until all has ended, or so long."""
        self._ended.wait(seconds)

    def cancel(self) -> None:
        for read in self._reads.values():
            read.cancel()


def _succeeded(read: Future[KVObject | None]) -> bool:
    return read.done() and not read.cancelled() and read.exception() is None


class TierStack:
    """`folder`, `store`: None where there is no such tier."""

    def __init__(
        self,
        owner: Owner,
        watch: Watch,
        *,
        host_bytes: int,
        disk_bytes: int = 0,
        folder: Folder | None = None,
        store: ObjectStore | None = None,
        pinned: bool = False,
        faults: Faults = NO_FAULTS,
    ) -> None:
        """Raises `OSError` where the folder cannot be read."""
        self.owner, self.pinned, self._faults = owner, pinned, faults
        self._watch, self._folder, self._store = watch, folder, store
        self._lock = threading.Lock()
        self._written = threading.Condition(self._lock)
        self._host = Ledger(host_bytes)
        self._items: dict[bytes, KVObject] = {}  # in host memory
        self._disk = Ledger(disk_bytes)
        self._remote: set[bytes] = set()
        self._sinking: dict[bytes, KVObject] = {}  # handed to the writer, not written yet
        self._sinking_bytes = 0
        self._jobs: queue.SimpleQueue[KVObject | None] = queue.SimpleQueue()
        if folder is not None:
            for name, size in scan(folder.path):
                for gone in self._disk.add(name, size):
                    folder.delete(gone)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="kv-read")
        self._writer = threading.Thread(target=self._write_on, name="kv-write", daemon=True)
        self._writer.start()
        self._reserve: Reserve | None = None

    def make_ready(self, size: int) -> None:
        """Pin memory for objects of so many bytes before there are any, where it has to be pinned:
        as much as host memory may hold, but no more than `MOST_READY`."""
        if self.pinned:
            self._reserve = Reserve(min(self._host.budget, MOST_READY), size)

    # -- what is where --------------------------------------------------------------------------

    @property
    def goes_deep(self) -> bool:
        """Whether there is a tier that outlives the process."""
        return self._folder is not None or self._store is not None

    @property
    def keeps(self) -> bool:
        """Whether there is any tier."""
        return bool(self._host.budget) or self.goes_deep

    @property
    def is_behind(self) -> bool:
        """Whether the writer has as much to do as it may."""
        return self._sinking_bytes >= QUEUE_BYTES

    def where(self, name: bytes) -> Tier | None:
        """The highest tier that has an object. Any thread may ask."""
        with self._lock:
            if name in self._items or name in self._sinking:
                return "host"
            if name in self._disk:
                return "disk"
            return "object_store" if name in self._remote else None

    def lies_deep(self, name: bytes) -> bool:
        """Whether an object outlives the process, or is about to."""
        with self._lock:
            return name in self._sinking or name in self._disk or name in self._remote

    def used(self, tier: Tier) -> tuple[int, int]:
        """Objects and bytes; of an object store, what it is known to have, and 0. Any thread may
        ask."""
        with self._lock:
            if tier == "object_store":
                return len(self._remote), 0
            ledger = self._host if tier == "host" else self._disk
            return len(ledger), ledger.used

    # -- down -----------------------------------------------------------------------------------

    def put(self, item: KVObject) -> None:
        """Take an object in. A durable one is written below at once; another never goes there."""
        with self._lock:
            self._hold(item)
            held = item.name in self._items  # else it is on its way below already
            if held:
                self._sink(item)
        if held:
            self._watch.moved("host", "down", item.num_bytes)

    def lose(self, reason: str) -> None:
        """Something was to be put, and cannot be."""
        self._watch.refused(reason)

    def _hold(self, item: KVObject) -> None:
        if item.name in self._items:
            self._items[item.name] = item  # it may be durable now
            return self._host.touch(item.name)
        for gone in self._host.add(item.name, item.host_bytes):
            self._sink(self._items.pop(gone, item))
        if item.name in self._host:
            self._items[item.name] = item

    def _sink(self, item: KVObject) -> None:
        """Hand a durable object to the writer, unless it is below already."""
        name = item.name
        if not (self.goes_deep and item.durable) or name in self._sinking or name in self._disk:
            return
        if name in self._remote and self._folder is None:
            return
        if self.is_behind:
            return self._watch.refused("queue_full")
        self._sinking[name] = item
        self._sinking_bytes += item.num_bytes
        self._jobs.put(item)

    def _write_on(self) -> None:
        """The writer's thread."""
        if self._store is not None:
            self._list(self._store)
        while (item := self._jobs.get()) is not None:
            try:
                item.done.synchronize()
                self._faults.at("tier.write")
                self._write(item)
            except Exception:  # whatever it is, the next one may be written
                logger.warning("an object of KV could not be written", exc_info=True)
                self._watch.refused("unwritable")
            finally:
                with self._lock:
                    del self._sinking[item.name]
                    self._sinking_bytes -= item.num_bytes
                    self._written.notify_all()

    def _list(self, store: ObjectStore) -> None:
        try:
            names = store.names()
        except StoredObjectError as error:
            logger.warning("%s", error)
            return
        with self._lock:
            self._remote.update(names)

    def _write(self, item: KVObject) -> None:
        header = header_of(self.owner, item)
        size = len(header) + item.num_bytes
        if self._folder is None or size > self._disk.budget:
            return self._upload(item.name, header + item.memory.numpy().tobytes())
        with self._lock:
            gone = self._disk.add(item.name, size)
        for name in gone:
            self._retire(name)
        try:
            self._folder.write(item, header)
        except BaseException:
            self._forget_file(item.name)
            raise
        self._watch.moved("disk", "down", size)

    def _retire(self, name: bytes) -> None:
        """A file has no room on disk any more."""
        assert self._folder is not None
        if self._store is not None and name not in self._remote:
            try:
                self._upload(name, self._folder.bytes_of(name))
            except OSError:
                logger.warning("an object of KV did not reach the object store", exc_info=True)
                self._watch.refused("unwritable")
        self._delete(name)

    def _delete(self, name: bytes) -> None:
        """A file that no book has any more; where it cannot go, the next start finds it."""
        assert self._folder is not None
        try:
            self._folder.delete(name)
        except OSError as error:
            logger.warning("a file of KV could not be deleted: %s", error)

    def _upload(self, name: bytes, data: bytes) -> None:
        if self._store is None:
            return
        self._store.write(name, data)
        with self._lock:
            self._remote.add(name)
        self._watch.moved("object_store", "down", len(data))

    # -- up -------------------------------------------------------------------------------------

    def get(self, name: bytes) -> KVObject | None:
        """An object in host memory, which is then used."""
        with self._lock:
            self._host.touch(name)
            return self._items.get(name) or self._sinking.get(name)

    def came_up(self, num_bytes: int) -> None:
        """Objects went from host memory to the pools."""
        self._watch.moved("host", "up", num_bytes)

    def fetch(self, names: Sequence[bytes]) -> Fetch:
        """Bring objects to host memory, in this order."""
        return Fetch({name: self._readers.submit(self._read, name) for name in names})

    def _read(self, name: bytes) -> KVObject | None:
        """A reader's thread. None: it is not there, or not whole, and forgotten."""
        item = self.get(name)
        sources = ((self._read_file, self._forget_file), (self._download, self._forget_remote))
        for read, forget in () if item else sources:
            try:
                self._faults.at("tier.read")
                item = item or read(name)
            except KVFileError as error:
                other = isinstance(error, KVMismatchError)
                self._watch.refused("other_model" if other else "damaged")
                forget(name, delete=True)
            except OSError:  # of a store it may be the network's fault
                self._watch.refused("unreadable")
                forget(name, delete=read == self._read_file)
            except RuntimeError:  # PyTorch's, for memory that it cannot pin
                logger.warning("an object of KV found no memory", exc_info=True)
                self._watch.refused("unreadable")
        if item is not None:
            with self._lock:
                self._hold(item)
        return item

    def _read_file(self, name: bytes) -> KVObject | None:
        with self._lock:
            if name not in self._disk:
                return None
            self._disk.touch(name)
        assert self._folder is not None
        item = self._folder.read(name)
        self._watch.moved("disk", "up", item.num_bytes)
        self._folder.touch(name)
        return item

    def _download(self, name: bytes) -> KVObject | None:
        if self._store is None or name not in self._remote:
            return None
        item = from_bytes(self.owner, name, self._store.read(name), pinned=self.pinned)
        self._watch.moved("object_store", "up", item.num_bytes)
        return item

    def _forget_file(self, name: bytes, *, delete: bool = True) -> None:
        with self._lock:
            self._disk.remove(name)
        if delete:
            self._delete(name)

    def _forget_remote(self, name: bytes, *, delete: bool) -> None:
        with self._lock:
            self._remote.discard(name)
        if self._store is not None and delete:
            try:
                self._store.delete(name)
            except StoredObjectError as error:
                logger.warning("%s", error)

    # -- the end --------------------------------------------------------------------------------

    def clear_host(self) -> None:
        """Forget what is in host memory, as a restart does."""
        with self._lock:
            self._items.clear()
            self._host = Ledger(self._host.budget)

    def rest(self, seconds: float) -> None:
        """Until the writer has written one more, or so long."""
        with self._lock:
            self._written.wait(seconds)

    def settle(self) -> None:
        """Wait until all that was handed to the writer is written."""
        with self._lock:
            self._written.wait_for(lambda: not self._sinking)

    def close(self, seconds: float) -> None:
        """Write what is still queued, as far as it takes no longer, and stop."""
        if self._reserve is not None:
            self._reserve.close()
        self._jobs.put(None)
        self._writer.join(seconds)
        self._readers.shutdown(wait=False, cancel_futures=True)

    def check_invariants(self) -> None:
        with self._lock:
            self._host.check_invariants()
            self._disk.check_invariants()
            assert set(self._host) == set(self._items), "host memory holds what no book knows"
            assert self._sinking_bytes == sum(i.num_bytes for i in self._sinking.values())

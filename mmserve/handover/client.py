"""One stage worker as a server sees it: jobs out, objects of KV in, and nobody who waits for ever.

Owns the connection, its two threads, and what has been asked. Knows nothing of what is worth
asking, or of who starts workers: where none answers at the address, it tries again.

What a worker that is gone was asked for ends as not found, and so does what came damaged. Whoever
waits goes on without it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket as sockets
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from multiprocessing import ProcessError
from pickle import UnpicklingError
from typing import Any, Protocol

import torch

from mmserve.handover import wire
from mmserve.handover.arrival import Arrival, Ports
from mmserve.handover.pace import Pace
from mmserve.handover.wire import End, Hello, Home, Job, Kind, Piece
from mmserve.request import Segment
from mmserve.tiers.kv_object import KVObject, Owner
from mmserve.tiers.stack import Fetch

logger = logging.getLogger(__name__)

RETRY_S = 0.25  # between two attempts to connect
# Of the connection, of what comes over it, and of memory for that (PyTorch's).
FAULTS = (OSError, EOFError, ProcessError, UnpicklingError, RuntimeError)
MOST_KNOWN = 1 << 16  # names of what a worker may still have cached


class Watch(Protocol):
    """Is told on any thread."""

    def stage_ended(self, kind: str, how: str, seconds: float) -> None:
        """done | lost | cancelled: a job was."""

    def stage_moved(self, kind: str, num_bytes: int) -> None: ...


@dataclass(frozen=True)
class Order:
    """What to have computed. `names`: of all the objects that are to come; `runs`, `images`: see
    `Job`; `leaves`: names of all that the worker has cached then; `expected`: seconds until all is
    there."""

    segments: tuple[Segment, ...]
    salt: bytes
    names: tuple[bytes, ...]
    runs: frozenset[bytes]
    images: frozenset[bytes]
    leaves: tuple[bytes, ...]
    expected: float


@dataclass
class _Open:
    """A job under way."""

    futures: dict[bytes, Future[KVObject | None]]
    expected: float
    since: float
    arrivals: dict[bytes, Arrival] = field(default_factory=dict)  # by the first object's name


class Coming(Fetch):
    """A fetch of what a worker was asked for."""

    def __init__(
        self, futures: dict[bytes, Future[KVObject | None]], cancel: Callable[[], None]
    ) -> None:
        super().__init__(futures)
        self._cancel = cancel

    def cancel(self) -> None:
        self._cancel()
        super().cancel()


class Client:
    """`address`: of one worker; `device`: where objects are to lie; `home`: the server's."""

    def __init__(
        self,
        kind: Kind,
        address: str,
        key: bytes,
        owner: Owner,
        device: torch.device,
        watch: Watch,
        home: Home,
    ) -> None:
        self._home = home
        self.shares = False  # whether it computes on what the server computes on
        self.kind, self.address = kind, address
        self._key, self._owner, self._device, self._watch = key, owner, device, watch
        self._lock = threading.Lock()
        self._pace = Pace()
        self._jobs: dict[int, _Open] = {}
        self._known: dict[bytes, None] = {}  # the last asked for last
        self._number = 0
        self._socket: wire.Socket | None = None
        self._out: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closed = threading.Event()
        name = f"stage {kind}"
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for work in (self._receive_on, self._send_on)
        ]
        for thread in self._threads:
            thread.start()

    # -- on any thread --------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._socket is not None

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    def unknown(self, names: Iterable[bytes]) -> int:
        """How many of these it has not been asked for before."""
        return sum(name not in self._known for name in names)

    def estimate(self, text_tokens: int, image_tokens: int, num_bytes: int) -> float | None:
        """Seconds until such a job would be done; None: no worker is there, or nobody knows."""
        with self._lock:
            if self._socket is None:
                return None
            return self._pace.estimate(time.monotonic(), text_tokens, image_tokens, num_bytes)

    def order(self, order: Order) -> Fetch:
        """Have it computed. What will not come ends as not found."""
        futures: dict[bytes, Future[KVObject | None]] = {name: Future() for name in order.names}
        with self._lock:
            self._number += 1
            number = self._number
            if self._socket is not None:
                self._remember(order.leaves)
                self._jobs[number] = _Open(futures, order.expected, time.monotonic())
                self._pace.began(number, order.expected)
                job = Job(number, order.segments, order.salt, order.runs, order.images)
                self._out.put((self._socket, job))
            else:
                _end(futures)
        return Coming(futures, lambda: self._cancel(number))

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            socket = self._socket
        if socket is not None:
            _shut(socket)
        self._out.put(None)

    def _remember(self, names: Iterable[bytes]) -> None:
        for name in names:
            self._known.pop(name, None)
            self._known[name] = None
        while len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]

    def _cancel(self, number: int) -> None:
        now = time.monotonic()
        with self._lock:
            found = self._jobs.get(number)
            if found is None or all(future.done() for future in found.futures.values()):
                return  # its end is on its way
            del self._jobs[number]
            if now - found.since > found.expected:  # else it says nothing of the worker
                self._pace.ended(number, now, found.expected, now - found.since)
            else:
                self._pace.dropped(number)
            if self._socket is not None:
                self._out.put((self._socket, wire.Cancel(number)))
        _end(found.futures)
        self._watch.stage_ended(self.kind, "cancelled", now - found.since)

    # -- the sender's thread --------------------------------------------------------------------

    def _send_on(self) -> None:
        while (message := self._out.get()) is not None:
            socket, word = message
            try:
                wire.say(socket, word)
            except (OSError, ValueError):
                _shut(socket)  # the receiver finds out

    # -- the receiver's thread ------------------------------------------------------------------

    def _receive_on(self) -> None:
        ports = Ports(self._device)
        told = ""
        while not self._closed.is_set():
            try:
                self._converse(ports)
            except FAULTS as error:
                if self.connected:
                    logger.warning("the %s worker at %s is gone", self.kind, self.address)
                elif (why := f"{type(error).__name__}: {error}") != told:
                    logger.info("no %s worker at %s yet: %s", self.kind, self.address, why)
                    told = why
            finally:
                self._lose()
            self._closed.wait(RETRY_S)

    def _converse(self, ports: Ports) -> None:
        """From one connection's begin to its end."""
        with wire.connect(self.address, self._key) as socket:
            hello = wire.hear(socket)
            if not isinstance(hello, Hello) or hello.kind != self.kind:
                raise OSError(f"what answers at {self.address} is no {self.kind} worker")
            if hello.seed != self._owner.seed:
                raise OSError(f"the worker at {self.address} has another model, or other settings")
            with self._lock:
                self._pace, self.shares = Pace(hello.rates), self._home.shares(hello.home)
            for _ in range(2):  # the first one also finds its way
                wire.say(socket, wire.Probe(wire.PROBE_BYTES))
                self._timed(ports, socket, wire.PROBE_BYTES)
            with self._lock:
                self._socket = socket
            while not self._closed.is_set():
                self._hear(ports, socket, wire.hear(socket))

    def _hear(self, ports: Ports, socket: wire.Socket, word: Any) -> None:
        if isinstance(word, Piece):
            payload = self._timed(ports, socket, word.size * len(word.names))
            self._watch.stage_moved(self.kind, payload.numel())
            with self._lock:
                job = self._jobs.get(word.job)
            if job is not None:
                self._take(job, word, payload, ports)
        elif isinstance(word, End):
            self._ended(word)
        else:
            raise OSError(f"the worker at {self.address} said what nobody understands")

    def _timed(self, ports: Ports, socket: wire.Socket, num_bytes: int) -> torch.Tensor:
        started = time.monotonic()
        payload = ports.take(num_bytes, lambda room: int(socket.recv_bytes_into(room)))
        with self._lock:
            self._pace.moved(num_bytes, time.monotonic() - started)
        return payload

    def _take(self, job: _Open, piece: Piece, payload: torch.Tensor, ports: Ports) -> None:
        first = piece.names[0]
        if first not in job.arrivals:
            job.arrivals[first] = Arrival(piece, self._owner, ports)
        for item in job.arrivals[first].add(piece, payload):
            if (future := job.futures.get(item.name)) is not None:
                with contextlib.suppress(InvalidStateError):  # nobody waits any more
                    future.set_result(item)

    def _ended(self, end: End) -> None:
        now = time.monotonic()
        with self._lock:
            self._pace.rates = end.rates
            job = self._jobs.pop(end.job, None)
            if job is None:
                return
            self._pace.ended(end.job, now, job.expected, now - job.since)
        _end(job.futures)
        self._watch.stage_ended(self.kind, "done", now - job.since)

    def _lose(self) -> None:
        with self._lock:
            self._socket, lost, self._jobs = None, list(self._jobs.values()), {}
            self._pace = Pace()
            self._known.clear()
        for job in lost:
            _end(job.futures)
            self._watch.stage_ended(self.kind, "lost", time.monotonic() - job.since)


def _end(futures: dict[bytes, Future[KVObject | None]]) -> None:
    """What has not come will not."""
    for future in futures.values():
        if not future.done():
            with contextlib.suppress(InvalidStateError):
                future.set_result(None)


def _shut(socket: wire.Socket) -> None:
    """Wake whoever reads of it."""
    with contextlib.suppress(OSError), sockets.socket(fileno=os.dup(socket.fileno())) as same:
        same.shutdown(sockets.SHUT_RDWR)

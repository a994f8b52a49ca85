"""What a server and its stage workers say to each other, and over what.

Owns the messages, addresses and sockets. Knows nothing of engines or of when anything is sent.

A worker's address is `host:port`, or the path of a Unix socket. Both ends prove that they know one
key (`multiprocessing.connection`) before anything else is read: what follows is pickled, so the key
opens both processes, and belongs to them alone.
"""

from __future__ import annotations

import os
import pickle
import platform
import uuid
from multiprocessing import connection
from typing import Any, Literal, NamedTuple

import torch

from mmserve.request import Segment
from mmserve.tiers.kv_object import Parts

Kind = Literal["encode", "prefill"]
Socket = Any  # multiprocessing's Connection, which mypy takes for generic and older Pythons do not

PROBE_BYTES = 8 << 20  # by which a new connection's speed is measured
LEAST_TIMED = 1 << 16  # bytes of a payload that says something of it


class Rates(NamedTuple):
    """Seconds that a token of a prompt takes, text and visual; None: not seen yet."""

    token_s: float | None
    image_token_s: float | None


class Home(NamedTuple):
    """What a process computes on: a GPU, or so many of the cores of a host."""

    device: str
    threads: int = 0
    cores: int = 0

    def shares(self, other: Home) -> bool:
        """Whether what one computes the other has to wait for."""
        crowded = not self.cores or self.threads + other.threads > self.cores
        return self.device == other.device and crowded


def home_of(device: torch.device) -> Home:
    """Of the thread that computes."""
    if device.type == "cuda":
        return Home(str(torch.cuda.get_device_properties(device).uuid))
    cores = os.cpu_count() or 1
    return Home(f"{platform.node()} {uuid.getnode():x}", torch.get_num_threads(), cores)


class Hello(NamedTuple):
    """A worker's first word. `seed`: of the names of its objects; equal seeds, equal models."""

    kind: Kind
    seed: bytes
    rates: Rates
    home: Home


class Probe(NamedTuple):
    """Send so many bytes, whatever they are."""

    num_bytes: int


class Job(NamedTuple):
    """Compute a prompt and send what is named: runs of text by their names, images by their keys.
    `salt`: its tenant's."""

    id: int
    segments: tuple[Segment, ...]
    salt: bytes
    runs: frozenset[bytes]
    images: frozenset[bytes]


class Cancel(NamedTuple):
    """Nobody waits for a job any more."""

    job: int


class Piece(NamedTuple):
    """Of each of some objects of equal `parts`, bytes [start, start + size); they follow, one
    object's behind another's. A layer of a run is such a piece."""

    job: int
    names: tuple[bytes, ...]
    parts: Parts
    start: int
    size: int


class End(NamedTuple):
    """All of a job has been sent that will be."""

    job: int
    rates: Rates


def say(socket: Socket, word: Any) -> None:
    """Raises OSError or ValueError where the connection is gone."""
    # The connection's own way would share tensors by handles, which do not leave a host.
    socket.send_bytes(pickle.dumps(word, protocol=pickle.HIGHEST_PROTOCOL))


def hear(socket: Socket) -> Any:
    """Raises EOFError, OSError or `pickle.UnpicklingError`."""
    return pickle.loads(socket.recv_bytes())


def where(address: str) -> str | tuple[str, int]:
    """Raises ValueError."""
    if "/" in address:
        return address
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{address!r} is neither host:port nor the path of a socket")
    return host, int(port)


def connect(address: str, key: bytes) -> Socket:
    """Raises OSError, EOFError, or `multiprocessing.AuthenticationError` for another key."""
    return connection.Client(where(address), authkey=key)


def listen(address: str, key: bytes) -> Any:
    """A `multiprocessing.connection.Listener`. Raises OSError."""
    return connection.Listener(where(address), authkey=key, backlog=16)

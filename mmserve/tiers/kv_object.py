"""One object of the tiers: an image's or a run of text's keys and values, all layers in one piece.

Owns its geometry and its form as a file. Knows nothing of pools or where files are.

As a file it is a safetensors file whose payload is the memory as it is: it is read by one call into
memory that a GPU copies from, and its header is known before that. One checksum covers what it says
and what it holds; a header that is not, to the last byte, the one that would be written is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor

from mmserve.kvfile.header import Identity, Kind, KVFileError, identity_from
from mmserve.tiers.host_memory import bytes_taken, host_memory

VERSION = 2
ALIGNMENT = 4096  # bytes: where the payload begins
MOST_HEADER = 1 << 24  # bytes
HOT = 1 << 20  # bytes that are read and then summed: they are still in the core's own cache

Fill = Callable[[memoryview, int], int]  # with what stands so far into a payload; bytes it had
# As safetensors names them.
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint8": "U8"}


class Waits(Protocol):
    """When a device has come so far."""

    def wait(self) -> None: ...  # the caller's stream
    def synchronize(self) -> None: ...  # the caller


class Now:
    """At once."""

    def wait(self) -> None:
        return None

    def synchronize(self) -> None:
        return None


@dataclass(frozen=True)
class Parts:
    """What an object holds: by layer group (its number), which of its pages, ascending."""

    kind: Kind
    num_tokens: int
    pages: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def num_pages(self) -> int:
        return sum(len(pages) for _, pages in self.pages)


@dataclass(frozen=True)
class Owner:
    """Whose objects these are, and their geometry. `seed`: contained in every name.

    `compatible`: fingerprints of weights whose KV may be among them, because they were declared to
    be nearly these. Who declares others, or none, does not find it.
    """

    identity: Identity
    compatible: tuple[str, ...] = ()

    @cached_property
    def words(self) -> str:
        """The identity as a file says it."""
        return _text(dataclasses.asdict(self.identity))

    @cached_property
    def seed(self) -> bytes:
        return hashlib.sha256("\n".join((self.words, *sorted(self.compatible))).encode()).digest()

    def dtype(self, group: int, kind: Kind) -> torch.dtype:
        made = getattr(torch, self.identity.stored(group, kind))
        assert isinstance(made, torch.dtype)
        return made

    def num_bytes(self, parts: Parts) -> int:
        return sum(self.bytes_of(g, parts.kind, len(pages)) for g, pages in parts.pages)

    def bytes_of(self, group: int, kind: Kind, num_pages: int) -> int:
        size = self.dtype(group, kind).itemsize
        return math.prod(self.identity.shape(group, kind, num_pages)) * size

    def views(self, parts: Parts, memory: Tensor) -> Iterator[tuple[int, tuple[int, ...], Tensor]]:
        """Of each group: its number, its pages, and where in `memory` (uint8) they are."""
        start = 0
        for group, pages in parts.pages:
            end = start + self.bytes_of(group, parts.kind, len(pages))
            shape = self.identity.shape(group, parts.kind, len(pages))
            view = memory[start:end].view(self.dtype(group, parts.kind))
            yield group, pages, view.view(shape)
            start = end


@dataclass(frozen=True)
class KVObject:
    """`memory`: uint8 [bytes] on the host, pinned where a GPU reads it; complete once `done`.
    `durable`: it may outlive the process."""

    name: bytes
    parts: Parts
    memory: Tensor
    done: Waits = field(default_factory=Now)
    durable: bool = False

    @property
    def num_bytes(self) -> int:
        return self.memory.numel()

    @property
    def host_bytes(self) -> int:
        """What its memory takes."""
        return bytes_taken(self.memory)


def header_of(owner: Owner, item: KVObject) -> bytes:
    """Before the payload. The device must have come so far."""
    state = _checksum(owner, item.name, item.parts)
    state.update(item.memory.numpy().data)
    return _header(owner, item.name, item.parts, state.hexdigest())


def _checksum(owner: Owner, name: bytes, parts: Parts) -> xxhash.xxh3_128:
    """Of what an object says of itself; its memory is still to come.

    XXH3: 9.7 GB/s of one core, where BLAKE3 had 4.5 and SHA-256 1.4; nobody's malice is at stake in
    one's own folder, only bits.
    """
    return xxhash.xxh3_128(owner.seed + _said(name, parts).encode())


def _header(owner: Owner, name: bytes, parts: Parts, checksum: str) -> bytes:
    said = {"identity": owner.words, "object": _said(name, parts), "xxh3": checksum}
    words: dict[str, Any] = {"__metadata__": said}
    start = 0
    for group, pages in parts.pages:
        shape = owner.identity.shape(group, parts.kind, len(pages))
        end = start + owner.bytes_of(group, parts.kind, len(pages))
        dtype = DTYPES[owner.identity.stored(group, parts.kind)]
        words[f"group.{group}"] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    text = _text(words).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class Opened:
    """A file's header, read and found to be of this owner and this name; not its payload."""

    owner: Owner
    name: bytes
    parts: Parts
    checksum: str

    @property
    def num_bytes(self) -> int:
        """Of the payload."""
        return self.owner.num_bytes(self.parts)

    def read(self, fill: Fill, *, pinned: bool) -> KVObject:
        """The object. Raises `KVFileError` where its payload is cut or damaged."""
        memory = host_memory(self.num_bytes, pinned=pinned)
        state, start = _checksum(self.owner, self.name, self.parts), 0
        left: memoryview = memory.numpy().data
        while left:
            count = fill(left[:HOT], start)
            if not count:
                raise KVFileError(f"object {self.name.hex()} is cut")
            state.update(left[:count])
            left, start = left[count:], start + count
        if state.hexdigest() != self.checksum:
            raise KVFileError(f"object {self.name.hex()} is damaged: its checksum is another")
        return KVObject(self.name, self.parts, memory, durable=True)


def header_length(start: bytes) -> int:
    """Bytes before the payload, by the first 8. Raises `KVFileError`."""
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > MOST_HEADER:
        raise KVFileError("the file is cut, or no object")
    return 8 + length


def open_header(owner: Owner, name: bytes, header: bytes) -> Opened:
    """Raises `KVFileError`, a `KVMismatchError` where the object is another model's."""
    try:
        said = json.loads(header[8:])["__metadata__"]
        if said["identity"] != owner.words:
            owner.identity.require(identity_from(json.loads(said["identity"])))
        version, _, kind, num_tokens, groups = json.loads(said["object"])
        if version != VERSION:
            raise KVFileError(f"objects of version {version!r}; known is {VERSION}")
        pages = tuple((group, tuple(own)) for group, own in groups)
        opened = Opened(owner, name, Parts(kind, num_tokens, pages), said["xxh3"])
        whole = _header(owner, name, opened.parts, opened.checksum)
    except KVFileError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise KVFileError(f"the header is malformed: {type(error).__name__}: {error}") from error
    if whole != header:
        raise KVFileError(f"the header is not that of object {name.hex()}")
    return opened


def _said(name: bytes, parts: Parts) -> str:
    return _text([VERSION, name.hex(), parts.kind, parts.num_tokens, parts.pages])


def _text(words: Any) -> str:
    return json.dumps(words, sort_keys=True, separators=(",", ":"))

"""Whose each page of the KV pools is at one moment. Values only.

An owner has a number that it keeps as long as it owns something; no other one gets it.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

FREE = -1  # in `PoolPages.owners`


class PrefixOwner(NamedTuple):
    """A node of the prefix cache. `parent`: the node above, None at the top; `start`: text tokens
    above it; `readers`: sequences that hold its pages now; `request`: the one that computed it,
    None where it came from a file."""

    number: int
    parent: int | None
    request: str | None
    start: int
    tokens: int
    readers: int


class RequestOwner(NamedTuple):
    """A running request, of the pages that are its alone. `tokens`: of text, `computed` of them;
    of a beam search, of its first beam."""

    number: int
    request: str
    tokens: int
    computed: int


class ImageOwner(NamedTuple):
    """An image in the vision pool. `state`: writing | ready | failed; `references`: by running
    sequences; `request`: the one that it was computed for, None where it came from a tier or a
    file; `kv_format`: it was held in since, None: it is as it was computed."""

    number: int
    key: bytes
    request: str | None
    tokens: int
    state: str
    references: int
    hits: int
    pinned: bool
    kv_format: str | None = None


Owner = PrefixOwner | RequestOwner | ImageOwner


class PoolPages(NamedTuple):
    """`kind`: text | vision; `window`: of the layers that read it, None: everything; `page_bytes`:
    over all its layers; `owners`: int by page, an owner's number or FREE."""

    kind: str
    window: int | None
    page_bytes: int
    owners: array[int]


class Snapshot(NamedTuple):
    """`seconds`: of the engine's time that it took."""

    pools: tuple[PoolPages, ...]
    owners: tuple[Owner, ...]
    page_size: int
    running: int
    waiting: int
    seconds: float

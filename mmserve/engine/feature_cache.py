"""What images feed the decoder, from when a tower has been started on them.

Owns which images' features are kept: those in use, and of the others the latest used, up to a
number of bytes. Knows nothing of sequences or KV.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future
from typing import Any, NamedTuple

from mmserve.model.adapter import Features


class Done:
    """When a device has come so far; without an event: at once."""

    def __init__(self, event: Any = None) -> None:
        """`event`: torch.cuda.Event."""
        self._event = event

    def passed(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """The caller's stream waits; the host does not."""
        if self._event is not None:
            self._event.wait()


class _Kept(NamedTuple):
    features: Features
    done: Done


class FeatureCache:
    """Features by image digest. One thread changes it; any may ask whether a digest is there."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._coming: dict[bytes, Future[Features]] = {}
        self._in_use: set[bytes] = set()
        self._bytes = 0

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._kept or digest in self._coming

    def await_(self, digest: bytes, coming: Future[Features]) -> None:
        """Features that another process makes; kept once somebody has asked for them."""
        assert digest not in self, "an image is looked at twice"
        self._coming[digest] = coming

    def put(self, digest: bytes, features: Features, done: Done) -> None:
        """Features that are there when `done` has passed; in use, as by `touch`."""
        assert digest not in self._kept, "an image is looked at twice"
        self._kept[digest] = _Kept(features, done)
        self._bytes += features.num_bytes
        self.touch(digest)

    def is_ready(self, digest: bytes) -> bool:
        """Whether `get` waits for nothing."""
        if (coming := self._coming.get(digest)) is not None:
            return coming.done()
        return digest in self._kept and self._kept[digest].done.passed()

    def get(self, digest: bytes) -> Features:
        """For the caller's stream, which waits for them. Raises KeyError, and where another process
        makes them what that raised."""
        if (coming := self._coming.pop(digest, None)) is not None:
            self.put(digest, coming.result(), Done())
        features, done = self._kept[digest]
        done.wait()
        self.touch(digest)
        return features

    def touch(self, digest: bytes) -> None:
        """What is kept is used now: it stays beyond the next `trim`."""
        if digest in self._kept:
            self._kept.move_to_end(digest)
            self._in_use.add(digest)

    def trim(self) -> None:
        """Forget what was used longest ago, down to the limit, but nothing that was used since the
        last time."""
        while self._bytes > self._max_bytes and next(iter(self._kept)) not in self._in_use:
            _, (features, _) = self._kept.popitem(last=False)
            self._bytes -= features.num_bytes
        self._in_use.clear()

    def clear(self) -> None:
        """Forget all; what a launched step reads, it holds itself."""
        self._kept.clear()
        self._coming.clear()
        self._in_use.clear()
        self._bytes = 0

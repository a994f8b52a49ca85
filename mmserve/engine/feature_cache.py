"""What images fed the decoder, kept for when they are seen behind other text.

Owns which images' features are kept: the latest used, up to a number of bytes. Knows nothing of
sequences or KV.
"""

from __future__ import annotations

from collections import OrderedDict

from mmserve.model.adapter import Features


class FeatureCache:
    """Features by image digest. One thread changes it; any may ask whether a digest is there."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, Features] = OrderedDict()
        self._bytes = 0

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._kept

    def put(self, digest: bytes, features: Features) -> None:
        """Keeps them until `trim` at least."""
        assert digest not in self._kept, "an image is looked at twice"
        self._kept[digest] = features
        self._bytes += features.num_bytes

    def get(self, digest: bytes) -> Features:
        """Raises KeyError."""
        self._kept.move_to_end(digest)
        return self._kept[digest]

    def touch(self, digest: bytes) -> None:
        """What is kept is used now."""
        if digest in self._kept:
            self._kept.move_to_end(digest)

    def trim(self) -> None:
        """Forget what was used longest ago, down to the limit."""
        while self._bytes > self._max_bytes:
            _, features = self._kept.popitem(last=False)
            self._bytes -= features.num_bytes

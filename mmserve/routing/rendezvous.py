"""Which replica a request belongs to: rendezvous hashing by image digests or text prefix, weighted
by load.

Owns where a key lives and how load moves it. Every router comes to the same answer from the same
names and weights, whatever the order of the names; nothing is remembered. Knows nothing of
transport, of engines or of who is alive: callers name the replicas that are.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

# A replica keeps all that is its own up to CALM times the mean load, and takes no new conversation
# from LIMIT times it on; between them its share shrinks evenly.
CALM, LIMIT = 1.25, 2.0
LEAST_WEIGHT = 1e-6  # all may be over the limit, and somebody must be chosen
BLOCK_BYTES = 1 << 20  # of scores, small enough for a core's cache

Keys = NDArray[np.uint32]


def key_of(text: str) -> int:
    """Of an image's digest or a text prefix: 32 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def load_weights(loads: ArrayLike, capacities: ArrayLike = 1.0) -> NDArray[np.float64]:
    """The weight of each replica: its capacity, less where it is busier for its capacity than the
    others. `loads`: conversations, tokens or seconds of work, as the caller counts."""
    capacity = np.broadcast_to(np.asarray(capacities, np.float64), np.shape(loads))
    load = np.asarray(loads, np.float64) / capacity
    mean = float(load.mean()) if load.size else 0.0
    # One request more than the mean is no load to speak of where the mean is small.
    calm, limit = CALM * mean + 1, LIMIT * mean + 2
    weights: NDArray[np.float64] = capacity * np.clip(
        (limit - load) / (limit - calm), LEAST_WEIGHT, 1.0
    )
    return weights


class Rendezvous:
    """The replicas of `names`. A key's replica is the first to ring of clocks that run as fast as
    their weights: a lost replica's keys are spread over the others by weight, no other key moves;
    one whose weight falls gives keys away and gets none."""

    def __init__(self, names: Sequence[str]) -> None:
        if not names or len(set(names)) != len(names):
            raise ValueError("replicas need names, each its own")
        self.names = tuple(names)
        self._seeds = np.array([key_of(name) for name in names], np.uint32)

    def homes(self, keys: ArrayLike, weights: ArrayLike | None = None) -> NDArray[np.intp]:
        """The index of each key's replica; `weights` one a replica, or None where all are equal."""
        keys = np.asarray(keys, np.uint32)
        count = len(self.names)
        rates = np.ones(count) if weights is None else np.asarray(weights, np.float64)
        if rates.shape != (count,) or not (rates > 0).all():
            raise ValueError(f"{count} replicas need as many weights above 0")
        patience = (1.0 / rates).astype(np.float32)
        homes = np.empty(len(keys), np.intp)
        rows = max(BLOCK_BYTES // (4 * count), 1)
        for start in range(0, len(keys), rows):
            block = slice(start, start + rows)
            rings = _exponential(keys[block, None] ^ self._seeds)
            rings *= patience
            homes[block] = rings.argmin(axis=1)
        return homes

    def choose(self, digests: Sequence[str], prefix: str, weights: ArrayLike | None = None) -> str:
        """The replica of a conversation: where most of its images live, of equals the first's; of
        one without images, where its text's beginning lives."""
        texts = digests or (prefix,)
        homes = self.homes([key_of(text) for text in texts], weights)
        ((most, _),) = Counter(int(home) for home in homes).most_common(1)
        return self.names[most]


def _exponential(bits: Keys) -> NDArray[np.float32]:
    """Of exponential distribution, each a function of its bits alone."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # two rounds mix every bit
        bits ^= bits >> np.uint32(shift)
        bits *= np.uint32(factor)
    bits ^= bits >> np.uint32(16)
    uniform = (bits >> np.uint32(8)).astype(np.float32)
    uniform += np.float32(0.5)
    uniform *= np.float32(2.0**-24)
    rings: NDArray[np.float32] = np.log(uniform, out=uniform)
    return np.negative(rings, out=rings)

"""Conversations over replicas: who finds the images, how even the load is, what a change moves.

Owns made-up conversations and the policies compared on the same ones. A conversation stays where
its first request went. The router is mmserve.routing's own. Knows nothing of models' speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmserve.plan.traffic import Traffic
from mmserve.routing.rendezvous import Rendezvous, load_weights

POPULARITY = 0.4  # power law: the image of rank r of C is shown first by a share (r / C) ** 0.4
OPEN_EACH = 50  # conversations of a replica, on average
LEAST_BLOCK = 64  # arrivals between two looks at the load: what routers know is as old
KEPT_KEYS = 100_000  # of which what a change moves is counted

Ints = NDArray[np.int64]
Choice = Callable[[int, int, Ints], Ints]  # arrivals from, to, open conversations by replica


@dataclass(frozen=True)
class Arrivals:
    """Images of each conversation in order, [sessions, images], 0 upwards."""

    images: Ints
    replicas: int

    @staticmethod
    def make(traffic: Traffic, sessions: int, replicas: int, seed: int) -> Arrivals:
        """Shared images are of unequal popularity; the others are shown once."""
        random = np.random.default_rng(seed)
        count = sessions * traffic.images
        shared = random.random(count) < traffic.repeat
        catalogue = max(int(round(shared.sum() / traffic.seen)), 1)
        ranks = (catalogue * random.random(count) ** (1 / POPULARITY)).astype(np.int64)
        own = catalogue + np.arange(count)
        return Arrivals(np.where(shared, ranks, own).reshape(sessions, traffic.images), replicas)

    @property
    def sessions(self) -> int:
        return len(self.images)

    @property
    def keys(self) -> NDArray[np.uint32]:
        """[sessions, images or 1]: digests, or each conversation's own beginning."""
        ids = self.images if self.images.shape[1] else np.arange(self.sessions)[:, None]
        mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return (mixed >> np.uint64(32)).astype(np.uint32)


@dataclass(frozen=True)
class Outcome:
    policy: str
    hit_rate: float  # of images shown
    best_hit_rate: float  # were each encoded once
    encodes: float  # of an image that several conversations show
    skew_max: float  # of open conversations by replica: most over mean, on average over time
    skew_p99: float


@dataclass(frozen=True)
class Change:
    """What one replica less or more moves, of what lives on all of them."""

    lost_share: float
    added_share: float
    lost_bytes: float
    added_bytes: float


def simulate(arrivals: Arrivals, pool_images: int) -> list[Outcome]:
    """All policies on the same conversations; `pool_images` fit a replica's vision pool."""
    router = Rendezvous([f"replica-{n}" for n in range(arrivals.replicas)])
    keys = arrivals.keys

    def image_aware(start: int, end: int, loads: Ints) -> Ints:
        part = keys[start:end]
        homes = router.homes(part.reshape(-1), load_weights(loads)).reshape(part.shape)
        return _most_voted(homes)

    def round_robin(start: int, end: int, loads: Ints) -> Ints:
        return np.arange(start, end) % len(loads)

    def least_loaded(start: int, end: int, loads: Ints) -> Ints:
        return np.resize(np.argsort(loads, kind="stable"), end - start)

    policies: dict[str, Choice] = {
        "image-aware": image_aware,
        "round robin": round_robin,
        "least loaded": least_loaded,
    }
    return [_outcome(name, choice, arrivals, pool_images) for name, choice in policies.items()]


def _most_voted(homes: NDArray[np.intp]) -> Ints:
    """By row: the most frequent, of equals the first, as `Rendezvous.choose` has it."""
    votes = (homes[:, :, None] == homes[:, None, :]).sum(axis=2)
    chosen: Ints = homes[np.arange(len(homes)), votes.argmax(axis=1)].astype(np.int64)
    return chosen


def _outcome(name: str, choose: Choice, arrivals: Arrivals, pool_images: int) -> Outcome:
    placed, skews = _place(choose, arrivals.sessions, arrivals.replicas)
    hits = _hits(arrivals.images, placed, pool_images)
    ids, counts = np.unique(arrivals.images, return_counts=True)
    shown = max(arrivals.images.size, 1)
    shared = np.isin(arrivals.images, ids[counts > 1])
    return Outcome(
        policy=name,
        hit_rate=float(hits.sum()) / shown,
        best_hit_rate=(arrivals.images.size - len(ids)) / shown,
        encodes=float((shared & ~hits).sum()) / max(int((counts > 1).sum()), 1),
        skew_max=float(skews[:, 0].mean()),
        skew_p99=float(skews[:, 1].mean()),
    )


def _place(choose: Choice, sessions: int, replicas: int) -> tuple[Ints, NDArray[np.float64]]:
    """The replica of each conversation, and [times, (most, p99)] of open ones over the mean."""
    block = max(LEAST_BLOCK, replicas // 4)
    ends = _ends(sessions, replicas, block)
    leaving, stay = np.argsort(ends, kind="stable"), _stay(sessions, replicas)
    placed = np.empty(sessions, np.int64)
    loads = np.zeros(replicas, np.int64)
    skews = []
    left = 0
    for start in range(0, sessions, block):
        end = min(start + block, sessions)
        placed[start:end] = choose(start, end, loads)
        loads += np.bincount(placed[start:end], minlength=replicas)
        gone = int(np.searchsorted(ends, end, sorter=leaving))
        loads -= np.bincount(placed[leaving[left:gone]], minlength=replicas)
        left = gone
        if end >= stay:
            skews.append(np.array([loads.max(), np.percentile(loads, 99)]) / loads.mean())
    return placed, np.array(skews)


def _stay(sessions: int, replicas: int) -> int:
    """Arrivals during which a conversation is open, on average."""
    return min(OPEN_EACH * replicas, max(sessions // 4, 1))


def _ends(sessions: int, replicas: int, block: int) -> NDArray[np.float64]:
    """At which arrival each conversation ends, of every policy's the same: exponential lengths,
    none within the block it begins in."""
    lengths = np.random.default_rng(sessions).exponential(_stay(sessions, replicas), sessions)
    return np.arange(sessions) + block + lengths


def _hits(images: Ints, placed: Ints, pool_images: int) -> NDArray[np.bool_]:
    """Whether each image was where it was shown. One leaves a replica once as many others as fit
    have been shown there since, equal ones counted again, so that hits are rather too few."""
    each = images.shape[1]
    flat, homes = images.reshape(-1), np.repeat(placed, each)
    order = np.argsort(homes, kind="stable")
    clock = np.empty(len(flat), np.int64)
    counts = np.bincount(homes)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    clock[order] = np.arange(len(flat)) - starts  # images shown at a replica before
    order = np.lexsort((clock, homes, flat))
    same = (np.diff(flat[order]) == 0) & (np.diff(homes[order]) == 0)
    near = np.diff(clock[order]) <= pool_images
    hits = np.zeros(len(flat), np.bool_)
    hits[order[1:]] = same & near
    return hits.reshape(images.shape)


def change(arrivals: Arrivals, live_bytes: float) -> Change:
    """`live_bytes` of KV live on all replicas together, by their keys."""
    names = [f"replica-{n}" for n in range(arrivals.replicas + 1)]
    keys = np.unique(arrivals.keys)[:KEPT_KEYS]
    now = Rendezvous(names[:-1]).homes(keys)
    more = Rendezvous(names).homes(keys)
    added = float((now != more).mean())
    lost = 1.0
    if arrivals.replicas > 1:
        fewer = Rendezvous(names[:-2]).homes(keys)
        lost = float((now != fewer).mean())
    return Change(lost, added, lost * live_bytes, added * live_bytes)

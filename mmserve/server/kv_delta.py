"""What watchers of the KV pools are sent: the whole picture once, then what has changed.

Owns the form of the messages, which is all that is sent of pools: counts, sizes and ids, no text,
no token and no picture. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from mmserve.kv_snapshot import ImageOwner, Owner, PoolPages, PrefixOwner, Snapshot

CHUNK = 64  # pages that are compared at once

Run = tuple[int, int, int, int]  # pool, first page, pages, owner or -1
Named = Callable[[str | None], str | None]  # of a request: its session


class Picture(NamedTuple):
    """A snapshot as it is sent. `owners`: by number, each with its session; `figures`: by name."""

    pools: tuple[PoolPages, ...]
    owners: dict[int, tuple[Owner, str | None]]
    counts: dict[str, int]
    figures: Mapping[str, float]


NOTHING = Picture((), {}, {}, {})


def picture(snapshot: Snapshot, session: Named, figures: Mapping[str, float]) -> Picture:
    owners = {owner.number: (owner, session(owner.request)) for owner in snapshot.owners}
    counts = {"running": snapshot.running, "waiting": snapshot.waiting}
    return Picture(snapshot.pools, owners, counts, figures)


def message(version: int, before: Picture, after: Picture, page_size: int) -> dict[str, Any] | None:
    """What leads from one picture to the next; None: they are the same.

    From `NOTHING` it is whole and says so: `pools` is there, and every page counts as free before.
    """
    whole = not before.pools
    pools = after.pools
    earlier = [array("i", [-1]) * len(p.owners) for p in pools] if whole else None
    runs: list[Run] = []
    for number, pool in enumerate(pools):
        old = before.pools[number].owners if earlier is None else earlier[number]
        runs += ((number, *run) for run in changed_runs(old, pool.owners))
    owners = [_owner_json(*o) for n, o in after.owners.items() if before.owners.get(n) != o]
    gone = [n for n in before.owners if n not in after.owners]
    figures = {k: v for k, v in after.figures.items() if before.figures.get(k) != v}
    if not (whole or runs or owners or gone or figures or before.counts != after.counts):
        return None
    body: dict[str, Any] = {"type": "kv.pages", "version": version}
    if whole:
        body |= {"page_size": page_size, "pools": [_pool_json(pool) for pool in pools]}
    return body | {
        "runs": runs,
        "owners": owners,
        "gone": gone,
        "figures": figures,
        **after.counts,
    }


def changed_runs(old: array[int], new: array[int]) -> Iterator[tuple[int, int, int]]:
    """(first page, pages, owner) of neighbours that have one new owner."""
    first, count, owner = 0, 0, -1
    for start in range(0, len(new), CHUNK):
        if old[start : start + CHUNK] == new[start : start + CHUNK]:
            continue
        for page in range(start, min(start + CHUNK, len(new))):
            if old[page] == new[page]:
                continue
            if count and page == first + count and new[page] == owner:
                count += 1
                continue
            if count:
                yield first, count, owner
            first, count, owner = page, 1, new[page]
    if count:
        yield first, count, owner


def _pool_json(pool: PoolPages) -> dict[str, Any]:
    return {
        "kind": pool.kind,
        "window": pool.window,
        "pages": len(pool.owners),
        "page_bytes": pool.page_bytes,
    }


def _owner_json(owner: Owner, session: str | None) -> dict[str, Any]:
    whose = {"request": owner.request, "session": session}
    if isinstance(owner, PrefixOwner):
        return {
            "id": owner.number,
            "kind": "prefix",
            **whose,
            "parent": owner.parent,
            "start": owner.start,
            "tokens": owner.tokens,
            "readers": owner.readers,
        }
    if isinstance(owner, ImageOwner):
        return {
            "id": owner.number,
            "kind": "image",
            **whose,
            "key": owner.key.hex(),
            "tokens": owner.tokens,
            "state": owner.state,
            "readers": owner.references,
            "hits": owner.hits,
            "pinned": owner.pinned,
            **({"kv_dtype": owner.kv_format} if owner.kv_format else {}),
        }
    return {
        "id": owner.number,
        "kind": "request",
        **whose,
        "tokens": owner.tokens,
        "computed": owner.computed,
    }

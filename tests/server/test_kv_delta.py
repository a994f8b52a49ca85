"""Whoever replays the messages has the picture; nothing is sent twice or for nothing."""

from __future__ import annotations

import json
from array import array
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mmserve.kv_snapshot import FREE, ImageOwner, PoolPages, PrefixOwner, RequestOwner, Snapshot
from mmserve.server.kv_delta import NOTHING, Picture, changed_runs, message, picture

PAGES = 150  # more than are compared at once
SIZE = 16


class Replay:
    """What a page does with messages."""

    def __init__(self) -> None:
        self.pools: list[list[int]] = []
        self.owners: dict[int, Any] = {}
        self.figures: dict[str, float] = {}
        self.counts: tuple[int, int] = (0, 0)

    def take(self, body: dict[str, Any] | None) -> None:
        if body is None:
            return
        body = json.loads(json.dumps(body))
        if "pools" in body:
            self.pools = [[FREE] * pool["pages"] for pool in body["pools"]]
            self.owners, self.figures = {}, {}
        for pool, first, count, owner in body["runs"]:
            self.pools[pool][first : first + count] = [owner] * count
        self.owners.update((owner["id"], owner) for owner in body["owners"])
        for number in body["gone"]:
            del self.owners[number]
        self.figures.update(body["figures"])
        self.counts = body["running"], body["waiting"]


def snapshots() -> st.SearchStrategy[Snapshot]:
    """Of two pools with a few owners."""
    numbers = st.integers(0, 5)
    runs = st.lists(st.tuples(st.integers(FREE, 5), st.integers(1, 70)), max_size=8)

    def build(text: Any, vision: Any, tokens: int, running: int) -> Snapshot:
        maps = []
        for runs in (text, vision):
            pages = [owner for owner, count in runs for _ in range(count)][:PAGES]
            maps.append(array("i", pages + [FREE] * (PAGES - len(pages))))
        named = sorted({n for owners in maps for n in owners} - {FREE})
        owners = tuple(
            (
                PrefixOwner(n, None, f"resp_{n}", 0, tokens, 0),
                RequestOwner(n, f"resp_{n}", tokens, 1),
                ImageOwner(n, bytes([n] * 32), None, tokens, "ready", 0, running, False),
            )[n % 3]
            for n in named
        )
        pools = (PoolPages("text", None, 8, maps[0]), PoolPages("vision", 9, 4, maps[1]))
        return Snapshot(pools, owners, SIZE, running, 0, 0.001)

    return st.builds(build, runs, runs, numbers, numbers)


def of(snapshot: Snapshot) -> Picture:
    return picture(
        snapshot, lambda id: "resp_a" if id == "resp_0" else None, {"a": float(snapshot.running)}
    )


@given(st.lists(snapshots(), min_size=1, max_size=6))
def test_replayed_changes_are_the_whole_picture(several: list[Snapshot]) -> None:
    page, before = Replay(), NOTHING
    for version, snapshot in enumerate(several, 1):
        after = of(snapshot)
        page.take(message(version, before, after, SIZE))
        new = Replay()
        new.take(message(version, NOTHING, after, SIZE))
        assert vars(page) == vars(new)
        assert page.pools == [list(pool.owners) for pool in snapshot.pools]
        assert set(page.owners) == {owner.number for owner in snapshot.owners}
        before = after


@given(snapshots())
def test_nothing_is_said_where_nothing_has_changed(snapshot: Snapshot) -> None:
    assert message(2, of(snapshot), of(snapshot), SIZE) is None


@given(snapshots(), snapshots())
def test_a_run_is_of_pages_that_have_changed_and_as_long_as_can_be(
    one: Snapshot, other: Snapshot
) -> None:
    old, new = one.pools[0].owners, other.pools[0].owners
    runs = list(changed_runs(old, new))
    pages = [page for first, count, _ in runs for page in range(first, first + count)]
    assert pages == [page for page in range(PAGES) if old[page] != new[page]]
    for (first, count, owner), (later, _, another) in zip(runs, runs[1:], strict=False):
        assert first + count < later or owner != another


def test_a_whole_picture_says_what_there_is_and_who_owns_it() -> None:
    pages = array("i", [3, 3, FREE, 4, 5, FREE])
    owners = (
        PrefixOwner(3, None, "resp_0", 0, 32, 1),
        RequestOwner(4, "chatcmpl_1", 20, 16),
        ImageOwner(5, b"\xab" * 32, None, 16, "ready", 1, 2, True),
    )
    snapshot = Snapshot((PoolPages("text", 64, 8, pages),), owners, SIZE, 1, 2, 0.0)
    assert message(1, NOTHING, of(snapshot), SIZE) == {
        "type": "kv.pages",
        "version": 1,
        "page_size": SIZE,
        "pools": [{"kind": "text", "window": 64, "pages": 6, "page_bytes": 8}],
        "runs": [(0, 0, 2, 3), (0, 3, 1, 4), (0, 4, 1, 5)],
        "owners": [
            {
                "id": 3,
                "kind": "prefix",
                "request": "resp_0",
                "session": "resp_a",
                "parent": None,
                "start": 0,
                "tokens": 32,
                "readers": 1,
            },
            {
                "id": 4,
                "kind": "request",
                "request": "chatcmpl_1",
                "session": None,
                "tokens": 20,
                "computed": 16,
            },
            {
                "id": 5,
                "kind": "image",
                "request": None,
                "session": None,
                "key": "ab" * 32,
                "tokens": 16,
                "state": "ready",
                "readers": 1,
                "hits": 2,
                "pinned": True,
            },
        ],
        "gone": [],
        "figures": {"a": 1.0},
        "running": 1,
        "waiting": 2,
    }

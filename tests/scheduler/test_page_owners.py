"""Every page that is not free has the owner that the books know, and nobody else is named."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.cache.layer_group import LayerGroup
from mmserve.kv_snapshot import (
    FREE,
    ImageOwner,
    PoolPages,
    PrefixOwner,
    RequestOwner,
    Snapshot,
)
from mmserve.request import ImageInput
from mmserve.scheduler.page_owners import PageOwners
from tests.scheduler.memory import PAGE
from tests.scheduler.world import CROSS, FULL, SELF, World, image, prompt, window

GROUPS = [(FULL,), (FULL, window(9)), (SELF, CROSS), (window(7),)]
PARTS: list[int | ImageInput] = [3, 5, 9, image(1), image(2)]
YES_OR_NO: st.SearchStrategy[bool] = st.booleans()


def owners_of(world: World) -> PageOwners:
    sizes = [1000 + g for g in range(len(world.groups))]
    return PageOwners(world.scheduler, sizes, sizes)


def named(snapshot: Snapshot, pool: PoolPages) -> Counter[int]:
    """Pages by owner."""
    return Counter(number for number in pool.owners if number != FREE)


def text_pool(snapshot: Snapshot) -> PoolPages:
    return next(pool for pool in snapshot.pools if pool.kind == "text")


def vision_pool(snapshot: Snapshot) -> PoolPages:
    return next(pool for pool in snapshot.pools if pool.kind == "vision")


def check(world: World, snapshot: Snapshot) -> None:
    numbers = [owner.number for owner in snapshot.owners]
    assert len(numbers) == len(set(numbers)), "two owners have one number"
    known, pools = set(numbers), iter(snapshot.pools)
    for g in world._texts:
        pool = next(pools)
        assert (pool.kind, pool.page_bytes) == ("text", 1000 + g)
        assert pool.window == world.groups[g].window
        assert len(pool.owners) == world.text[g].num_pages
        for page, number in enumerate(pool.owners):
            assert (number == FREE) == (world.text[g].ref_count(page) == 0)
        assert set(named(snapshot, pool)) <= known
    for g in world._image_groups:
        pool, index = next(pools), world.vision[g]
        counts = named(snapshot, pool)
        assert sum(counts.values()) == index.num_used
        assert set(counts) <= known
        by_number = {o.number: o for o in snapshot.owners if isinstance(o, ImageOwner)}
        for key, entry in index.entries():
            owner = by_number[pool.owners[entry.pages[0]]]
            assert owner.key == key and {pool.owners[p] for p in entry.pages} == {owner.number}
    assert next(pools, None) is None
    check_tree(snapshot)


def check_tree(snapshot: Snapshot) -> None:
    nodes = {o.number: o for o in snapshot.owners if isinstance(o, PrefixOwner)}
    for node in nodes.values():
        above = 0 if node.parent is None else nodes[node.parent].start + nodes[node.parent].tokens
        assert node.start == above and node.tokens % PAGE == 0 < node.tokens


@given(data=st.data())
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("groups", GROUPS, ids=range(len(GROUPS)))
def test_owned_pages_are_those_that_are_not_free_whatever_comes(
    groups: tuple[LayerGroup, ...], data: st.DataObject
) -> None:
    world = World(groups=groups, text_pages=24, vision_pages=8)
    owners = owners_of(world)
    for _ in range(data.draw(st.integers(1, 6))):
        parts = data.draw(st.lists(st.sampled_from(PARTS), min_size=1, max_size=3))
        world.submit(prompt(*parts, 2), data.draw(st.integers(1, 6)))
        for _ in range(data.draw(st.integers(0, 5))):
            world.step()
            check(world, owners.look())
        if data.draw(YES_OR_NO) and world.live:
            world.abort(world.live[0])
            check(world, owners.look())
    world.run()
    check(world, owners.look())


def test_a_running_request_owns_its_pages_until_the_cache_does() -> None:
    world = World()
    owners = owners_of(world)
    assert owners.look().owners == ()
    world.submit(prompt(2 * PAGE, image(1), PAGE), max_tokens=PAGE)
    world.step()
    before = owners.look()
    assert (before.running, before.waiting) == (1, 0)
    (seen,) = [o for o in before.owners if isinstance(o, ImageOwner)]
    assert (seen.key, seen.request, seen.state) == (image(1).digest, "1", "ready")
    assert (seen.tokens, seen.references, seen.pinned) == (6, 1, False)
    world.run()
    after = owners.look()
    (image_after,) = [o for o in after.owners if isinstance(o, ImageOwner)]
    assert image_after.number == seen.number, "an owner keeps its number"
    assert image_after.references == 0
    nodes = [o for o in after.owners if isinstance(o, PrefixOwner)]
    assert not [o for o in after.owners if isinstance(o, RequestOwner)]
    assert {node.request for node in nodes} == {"1"} and not any(n.readers for n in nodes)
    assert sum(n.tokens for n in nodes) == sum(named(after, text_pool(after)).values()) * PAGE


def test_what_two_requests_share_has_two_readers_and_one_writer() -> None:
    world = World()
    owners = owners_of(world)
    world.submit(prompt(4 * PAGE), max_tokens=1)
    world.run()
    for base in (1000, 2000):
        shared = prompt(4 * PAGE)[0]
        world.submit((shared, *prompt(3, base=base)), max_tokens=3)
    world.step()
    snapshot = owners.look()
    top = next(o for o in snapshot.owners if isinstance(o, PrefixOwner) and o.parent is None)
    assert (top.request, top.readers, top.start) == ("1", 2, 0)


def test_an_abort_leaves_nobody_who_is_gone() -> None:
    world = World(prefix_caching=False)
    owners = owners_of(world)
    seq = world.submit(prompt(3 * PAGE, image(1)), max_tokens=5)
    world.step()
    assert [o for o in owners.look().owners if isinstance(o, RequestOwner)]
    world.abort(seq)
    snapshot = owners.look()
    assert not named(snapshot, text_pool(snapshot))
    assert not [o for o in snapshot.owners if not isinstance(o, ImageOwner)]
    assert snapshot.running == 0


def test_an_image_that_is_dropped_is_gone_unless_somebody_reads_it() -> None:
    world = World()
    owners = owners_of(world)
    world.submit(prompt(3, image(1), 3), max_tokens=4)
    world.step()
    assert not world.vision[0].drop(image(1).digest), "it is read"
    world.run()
    before = owners.look()
    world.vision[0].pin(image(1).digest)
    assert [o.pinned for o in owners.look().owners if isinstance(o, ImageOwner)] == [True]
    assert world.vision[0].drop(image(1).digest)
    world.check()
    after = owners.look()
    assert named(before, vision_pool(before)) and not named(after, vision_pool(after))
    assert not world.vision[0].drop(image(1).digest), "it is gone"

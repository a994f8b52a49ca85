"""What an engine tells of its pages while it works, steps in the air included."""

from __future__ import annotations

import pytest

from mmserve.kv_snapshot import FREE, ImageOwner, RequestOwner, Snapshot
from tests.engine.driver import Driver, picture, tiny_driver, words
from tests.engine.tiny import PAGE_BYTES


def looked(d: Driver) -> Snapshot:
    """With every page accounted for."""
    snapshot, holdings = d.engine.page_owners.look(), d.engine.scheduler.holdings
    text, vision = snapshot.pools
    assert (text.kind, vision.kind) == ("text", "vision")
    assert text.page_bytes == vision.page_bytes == PAGE_BYTES
    assert sum(n != FREE for n in text.owners) == len(text.owners) - holdings.text[0].num_free
    assert sum(n != FREE for n in vision.owners) == holdings.vision[0].num_used
    assert {*text.owners, *vision.owners} - {FREE} <= {o.number for o in snapshot.owners}
    return snapshot


def requests(snapshot: Snapshot) -> set[str]:
    return {owner.request for owner in snapshot.owners if isinstance(owner, RequestOwner)}


@pytest.mark.parametrize("overlaps", [False, True])
def test_every_page_has_an_owner_at_every_step(overlaps: bool) -> None:
    d = tiny_driver(overlaps)
    shared = d.image(picture(1))
    names = {d.submit((shared, words(seed, 30 + 9 * seed))) for seed in range(3)}
    seen: set[str] = set()
    while d.engine.has_work:
        d.step()
        seen |= requests(looked(d))
    assert seen == names
    after = looked(d)
    assert not requests(after)
    (image,) = [owner for owner in after.owners if isinstance(owner, ImageOwner)]
    assert (image.key, image.request, image.hits) == (shared.image.digest, "0", 2)


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_abort_leaves_no_owner_behind(overlaps: bool) -> None:
    d = tiny_driver(overlaps, prefix_caching=False)
    asked = [d.submit((d.image(picture(seed)), words(seed, 40))) for seed in range(2)]
    for _ in range(4):
        d.step()
    for request in asked:
        d.abort(request)
    snapshot = looked(d)
    assert not requests(snapshot) and snapshot.running == 0
    assert all(number == FREE for number in snapshot.pools[0].owners)
    d.run()
    looked(d)
    d.assert_idle()

"""The scheduler and its books under whatever clients and operators do, in any order.

Whoever reads what is checked by the world itself (`World.check`). Here: where each request is, and
what an aborted one leaves.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mmserve.errors import ContextLengthExceededError
from mmserve.request import ImageInput, Segment, Tenant
from mmserve.scheduler.batch import Batch
from mmserve.scheduler.holdings import held_pages
from mmserve.sequence import Sequence, SequenceStatus
from tests.scheduler.test_groups import IMAGES, prompts, worlds
from tests.scheduler.world import World

TENANTS = [Tenant("a", b"a"), Tenant("b", b"b", weight=3.0), Tenant("c", b"a")]
TENANT = st.sampled_from(TENANTS)


def ask(world: World, segments: tuple[Segment, ...], count: int, tenant: Tenant) -> Sequence | None:
    """At most as many tokens as there can ever be room for."""
    text = sum(len(getattr(s, "token_ids", ())) for s in segments)
    room = world.scheduler.text_capacity - text
    try:
        return world.submit(segments, max(min(count, room), 1), tenant=tenant)
    except ContextLengthExceededError:
        return None


class Service(RuleBasedStateMachine):
    """Requests under several salts come, go and are aborted, while somebody pins and forgets."""

    @initialize(world=worlds())
    def begin(self, world: World) -> None:
        self.world = world
        self.asked: list[Sequence] = []
        self.aborted: list[Sequence] = []

    @rule(segments=prompts(), count=st.integers(1, 9), tenant=TENANT)
    def submit(self, segments: tuple[Segment, ...], count: int, tenant: Tenant) -> None:
        seq = ask(self.world, segments, count, tenant)
        self.asked += [seq] if seq else []

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            working = self.world.scheduler.has_work
            ending = bool(self.world.flight), len(self.world.failed)
            moved = bool(self.world.step()) or ending != (False, len(self.world.failed))
            assert moved or not working, "a step did nothing while there was work"

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        seq = self.world.live[data.draw(st.integers(0, len(self.world.live) - 1))]
        self.world.abort(seq)
        self.aborted.append(seq)

    @rule()
    def abort_all(self) -> None:
        """And everything is free, or can be had at once."""
        self.aborted += self.world.live
        while self.world.live:
            self.world.abort(self.world.live[-1])
        self.world.assert_idle()

    @rule(which=st.sampled_from(IMAGES), pinned=st.booleans())
    def pin(self, which: ImageInput, pinned: bool) -> None:
        for index in self.world.vision:
            (index.pin if pinned else index.unpin)(which.digest)

    @rule(which=st.sampled_from(IMAGES))
    def forget_an_image(self, which: ImageInput) -> None:
        for index in self.world.vision:
            entry = index.lookup(which.digest)
            idle = entry is not None and not entry.references
            assert index.drop(which.digest) == idle

    @precondition(lambda self: self.world.radix)
    @rule(group=st.integers(0, 2), pages=st.integers(1, 9))
    def forget_text(self, group: int, pages: int) -> None:
        radix = self.world.radix
        assert radix is not None
        radix.evict(group % len(radix.num_pages), pages)

    @invariant()
    def every_request_waits_runs_or_has_ended_once(self) -> None:
        if not hasattr(self, "world"):
            return
        scheduler = self.world.scheduler
        places = (
            [*scheduler.waiting, *scheduler.running],
            [*self.world.done, *self.world.failed, *self.aborted],
        )
        assert sorted(map(id, self.asked)) == sorted(id(s) for seqs in places for s in seqs)
        waits = {SequenceStatus.WAITING, SequenceStatus.PREEMPTED}
        assert all(seq.status in waits for seq in scheduler.waiting)
        assert all(seq.status is SequenceStatus.RUNNING for seq in scheduler.running)
        assert all(seq.finished and not any(seq.tables) for seq in places[1])

    @invariant()
    def no_page_is_read_under_two_salts(self) -> None:
        salts: dict[tuple[int, int], bytes] = {}
        for seq in self.world.scheduler.running if hasattr(self, "world") else []:
            salt = seq.request.tenant.salt
            for group, table in enumerate(seq.tables):
                for page in held_pages(table):
                    assert salts.setdefault((group, page), salt) == salt

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run()
            self.world.assert_right()
            self.world.assert_idle()


TestService = Service.TestCase
TestService.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class Ghosts(RuleBasedStateMachine):
    """Two worlds with the same requests, and in one of them some more, aborted before they ran."""

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        shown = data.draw(worlds())
        names = ("text_pages", "vision_pages", "config", "prefix_caching", "failing", "overlaps")
        more = ("groups", "in_context", "whole_prompts", "head")
        same = {name: getattr(shown, name) for name in (*names, *more)}
        self.worlds = World(**same), World(**same)

    @rule(segments=prompts(), count=st.integers(1, 9), tenant=TENANT)
    def submit(self, segments: tuple[Segment, ...], count: int, tenant: Tenant) -> None:
        for world in self.worlds:
            ask(world, segments, count, tenant)

    @rule(segments=prompts(), count=st.integers(1, 9), tenant=TENANT)
    def haunt(self, segments: tuple[Segment, ...], count: int, tenant: Tenant) -> None:
        haunted, other = self.worlds
        if (ghost := ask(haunted, segments, count, tenant)) is not None:
            haunted.abort(ghost)
        other._arrival = haunted._arrival  # ids are counted

    @precondition(lambda self: self.worlds[0].live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        which = data.draw(st.integers(0, len(self.worlds[0].live) - 1))
        for world in self.worlds:
            world.abort(world.live[which])

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            mine, others = (self.told(world.step()) for world in self.worlds)
            assert mine == others, "who was aborted before it ran changes what others get"

    def told(self, batch: Batch) -> list[object]:
        chunks = [(c.seq.id, c.start, c.count, c.samples, c.seq.tables) for c in batch.chunks]
        return [*chunks, *((job.key, job.pages) for job in batch.images)]


TestGhosts = Ghosts.TestCase
TestGhosts.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)

"""Steps are shared fairly between tenants; shares are counted in computed tokens, over steps."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.config import SchedulerConfig
from mmserve.request import Tenant
from mmserve.sequence import Sequence, SequenceStatus
from tests.scheduler.world import World, image, prompt

FLOOD, OTHER = Tenant("flood"), Tenant("other")
CONFIG = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=16)
ROOMY = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32)  # seats are taken first


class Crowd:
    """Tenants that keep so many requests of so many prompt and answer tokens under way."""

    def __init__(self, config: SchedulerConfig = CONFIG) -> None:
        self.world = World(text_pages=2000, config=config, prefix_caching=False)
        self.shares: Counter[str] = Counter()
        self._asked = 0

    def ask(self, tenant: Tenant, tokens: int, answer: int) -> Sequence:
        self._asked += 1
        return self.world.submit(prompt(tokens, base=self._asked), answer, tenant=tenant)

    def step(self) -> None:
        for chunk in self.world.step().chunks:
            self.shares[chunk.seq.request.tenant.name] += chunk.num_rows

    def running(self, tenant: Tenant) -> int:
        return sum(s.request.tenant == tenant for s in self.world.scheduler.running)


def keep_busy(crowd: Crowd, tenant: Tenant, under_way: int, tokens: int, answer: int) -> None:
    live = sum(seq.request.tenant == tenant for seq in crowd.world.live)
    for _ in range(under_way - live):
        crowd.ask(tenant, tokens, answer)


@pytest.mark.parametrize(("tokens", "answer"), [(60, 4), (1, 60)])
@pytest.mark.parametrize("others", [(20, 20), (60, 4), (3, 40)])
def test_who_floods_gets_no_more_than_who_asks_a_little_more_than_its_share(
    tokens: int, answer: int, others: tuple[int, int]
) -> None:
    crowd = Crowd()
    for _ in range(40):
        crowd.ask(FLOOD, tokens, answer)
    for _ in range(250):
        keep_busy(crowd, FLOOD, 40, tokens, answer)
        keep_busy(crowd, OTHER, CONFIG.max_num_seqs, *others)
        crowd.step()
    shares = crowd.shares
    assert shares["other"] == pytest.approx(shares["flood"], rel=0.2)


def test_a_tenant_of_threefold_weight_gets_three_times_as_much() -> None:
    crowd, heavy = Crowd(), Tenant("heavy", weight=3.0)
    for _ in range(250):
        keep_busy(crowd, FLOOD, 50, 20, 20)
        keep_busy(crowd, heavy, 50, 20, 20)
        crowd.step()
    assert crowd.shares["heavy"] == pytest.approx(3 * crowd.shares["flood"], rel=0.2)


def test_who_has_no_seat_gets_one_at_once_though_all_are_taken_by_long_answers() -> None:
    crowd = Crowd(ROOMY)
    seqs = [crowd.ask(FLOOD, 5, 80) for _ in range(20)]
    for _ in range(20):
        crowd.step()
    assert crowd.running(FLOOD) == ROOMY.max_num_seqs
    asked = crowd.ask(OTHER, 5, 3)
    crowd.step()  # in which the other tenant gets ahead
    crowd.step()
    assert asked.status is SequenceStatus.RUNNING
    assert seqs[0].status is SequenceStatus.RUNNING, "the earliest gives way to nobody"
    crowd.ask(OTHER, 5, 3)
    crowd.step()
    assert crowd.running(OTHER) == 1, "who has a seat takes none from anybody"
    while not asked.finished:
        crowd.step()
    crowd.world.run()
    crowd.world.assert_right()


def test_a_short_question_does_not_wait_for_all_prompts_of_another_tenant() -> None:
    crowd = Crowd()
    for _ in range(CONFIG.max_num_seqs - 1):
        crowd.ask(FLOOD, 150, 2)
    crowd.step()
    asked = crowd.ask(OTHER, 5, 3)
    for _ in range(6):
        crowd.step()
    assert asked.finished, "and the others' prompts take a hundred steps"


def assert_halves_from_now(crowd: Crowd) -> None:
    """Of two that have enough to do."""
    crowd.shares.clear()
    for _ in range(250):
        keep_busy(crowd, FLOOD, 20, 20, 20)
        keep_busy(crowd, OTHER, 20, 20, 20)
        crowd.step()
    assert crowd.shares["other"] == pytest.approx(crowd.shares["flood"], rel=0.2)


def test_nobody_is_owed_for_a_time_in_which_it_asked_nothing() -> None:
    crowd = Crowd()
    for _ in range(250):
        keep_busy(crowd, FLOOD, 20, 20, 20)
        crowd.step()
    assert_halves_from_now(crowd)


def test_nobody_is_owed_for_a_time_in_which_it_asked_little() -> None:
    crowd = Crowd()
    for n in range(250):
        keep_busy(crowd, FLOOD, 20, 20, 20)
        if n % 4 == 0:
            crowd.ask(OTHER, 1, 8)  # which has not ended when the next one comes
        crowd.step()
    assert_halves_from_now(crowd)


def test_nobody_is_owed_for_a_time_in_which_its_pictures_were_late() -> None:
    """A chunk whose picture is not there is not computed, and scheduled again."""
    crowd, held = Crowd(), set()

    def step(*, late: bool) -> None:
        for chunk in crowd.world.scheduler.schedule().chunks:
            seq, tenant = chunk.seq, chunk.seq.request.tenant
            if late and tenant == OTHER and seq not in held:
                held.add(seq)
                continue
            crowd.shares[tenant.name] += chunk.count
            crowd.world.scheduler.advance(chunk)
            if chunk.samples:
                crowd.world.abort(seq)

    for _ in range(100):
        keep_busy(crowd, FLOOD, 8, 20, 1)
        crowd.ask(OTHER, 2, 1)  # the one before was held
        step(late=True)
    crowd.shares.clear()
    for _ in range(100):
        keep_busy(crowd, FLOOD, 8, 20, 1)
        keep_busy(crowd, OTHER, 8, 20, 1)
        step(late=False)
    assert crowd.shares["other"] == pytest.approx(crowd.shares["flood"], rel=0.2)


def test_images_count_as_what_their_tokens_are() -> None:
    """One tenant shows a new picture with every word, the other one writes."""
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=32)
    world, words, pictures = World(text_pages=400, vision_pages=64, config=config), 0, 0
    for n in range(200):
        if not any(seq.request.tenant == OTHER for seq in world.scheduler.waiting):
            world.submit(prompt(16, base=9 * n), 1, tenant=OTHER)
        if not any(seq.request.tenant == FLOOD for seq in world.scheduler.waiting):
            world.submit(prompt(1, image(n, 15), base=9 * n), 1, tenant=FLOOD)
        batch = world.step()
        pictures += sum(job.image.num_tokens for job in batch.images)
        for chunk in batch.chunks:
            (words, pictures) = (
                (words + chunk.num_rows, pictures)
                if chunk.seq.request.tenant == OTHER
                else (words, pictures + chunk.num_rows)
            )
    assert words == pytest.approx(pictures, rel=0.2)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9), st.integers(0, 3)), max_size=20))
@settings(max_examples=25, deadline=None)
def test_one_tenant_is_served_in_order_of_arrival(wanted: list[tuple[int, int, int]]) -> None:
    crowd = Crowd(SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=16))
    asked, seen = [], []
    for tokens, answer, steps in wanted:
        asked.append(crowd.ask(FLOOD, tokens, answer))
        for _ in range(steps):
            crowd.world.step()
            seen += [s for s in crowd.world.scheduler.running if s not in seen]
    while crowd.world.scheduler.has_work:
        crowd.world.step()
        seen += [s for s in crowd.world.scheduler.running if s not in seen]
    order = [asked.index(seq) for seq in seen]
    assert order == sorted(order)

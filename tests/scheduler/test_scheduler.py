"""The scheduler under any traffic: it always moves, never mixes, and gives everything back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from mmserve.config import SchedulerConfig
from mmserve.errors import ContextLengthExceededError
from mmserve.request import (
    EVERYBODY,
    ImageInput,
    ImageSegment,
    Segment,
    Tenant,
    TextSegment,
)
from mmserve.sequence import Sequence, SequenceStatus
from tests.scheduler.memory import PAGE
from tests.scheduler.world import World, image, prompt

IMAGES = [image(n, tokens) for n, tokens in enumerate((6, 6, 1, 4, 5, 9, 6, 6))]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    return World(
        text_pages=draw(st.integers(3, 24)),
        vision_pages=draw(st.integers(3, 10)),
        config=SchedulerConfig(
            max_num_seqs=draw(st.integers(1, 6)),
            max_num_batched_tokens=draw(st.sampled_from([1, 2, 3, 7, 16, 64])),
            max_images_per_step=draw(st.integers(1, 3)),
        ),
        prefix_caching=draw(st.booleans()),
        overlaps=draw(st.booleans()),
    )


@st.composite
def prompts(draw: st.DrawFn) -> tuple[Segment, ...]:
    """Text, images, text, images ..., always with text at the end, often sharing beginnings."""
    parts: list[int | ImageInput] = []
    for _ in range(draw(st.integers(0, 3))):
        parts.append(draw(st.integers(1, 9)))
        parts += draw(st.lists(st.sampled_from(IMAGES), max_size=2))
    return prompt(*parts, draw(st.integers(1, 9)), base=draw(st.sampled_from([0, 0, 0, 500])))


class Traffic(RuleBasedStateMachine):
    """Requests come, are aborted, fail and finish, in any order."""

    @initialize(world=worlds())
    def begin(self, world: World) -> None:
        self.world = world

    @rule(
        segments=prompts(),
        max_tokens=st.integers(1, 9),
        prefill_only=st.booleans(),
        tenant=st.sampled_from([EVERYBODY, Tenant("a"), Tenant("b", weight=3.0)]),
    )
    def submit(
        self, segments: tuple[Segment, ...], max_tokens: int, prefill_only: bool, tenant: Tenant
    ) -> None:
        text = sum(len(getattr(s, "token_ids", ())) for s in segments)
        room = self.world.scheduler.text_capacity - text
        try:
            count = max(min(max_tokens, room), 1)
            self.world.submit(segments, count, prefill_only=prefill_only, tenant=tenant)
        except ContextLengthExceededError:
            digests = {s.image.digest: s.image for s in segments if isinstance(s, ImageSegment)}
            pages = sum(self.world.vision[0].pages_for(i.num_tokens) for i in digests.values())
            assert room < 1 or pages > self.world.vision_pages, "it would have fitted"

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            working = self.world.scheduler.has_work
            landing = bool(self.world.flight)
            stepped = bool(self.world.step())
            assert stepped == working or (working and landing)

    @rule(which=st.integers(0, 99))
    def abort(self, which: int) -> None:
        if self.world.live:
            self.world.abort(self.world.live[which % len(self.world.live)])

    @rule(which=st.sampled_from(IMAGES), broken=st.booleans())
    def breaks(self, which: ImageInput, broken: bool) -> None:
        (self.world.failing.add if broken else self.world.failing.discard)(which.digest)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run()
            self.world.assert_right()
            self.world.assert_idle()


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@given(worlds(), st.lists(st.tuples(prompts(), st.integers(1, 12)), min_size=1, max_size=9))
@settings(max_examples=60, deadline=None)
def test_all_that_is_admitted_at_once_finishes_with_the_tokens_it_gets_alone(
    world: World, wanted: list[tuple[tuple[Segment, ...], int]]
) -> None:
    for segments, count in wanted:
        text = sum(len(getattr(s, "token_ids", ())) for s in segments)
        try:
            world.submit(segments, max(min(count, world.scheduler.text_capacity - text), 1))
        except ContextLengthExceededError:
            continue
    world.run()
    world.assert_right()
    world.assert_idle()


def test_clients_with_more_images_than_the_pool_holds_all_finish() -> None:
    """B13: 16 clients with 2 images each, room for 2 images, one encoder run a step."""
    config = SchedulerConfig(max_num_batched_tokens=8, max_images_per_step=1)
    world = World(text_pages=64, vision_pages=4, config=config)
    for n in range(16):
        a, b = image(2 * n), image(2 * n + 1)
        world.submit(prompt(20, a, 9, b, 11, base=50 * n), 4)
    world.run(limit=600)
    world.assert_right()
    world.assert_idle()
    assert len(world.done) == 16
    assert len(world.encoded) == len(set(world.encoded)) == 32, "an image was encoded twice"


def test_a_prompt_larger_than_the_pool_is_refused_with_the_numbers_and_small_ones_run() -> None:
    """B15."""
    world = World(text_pages=16, max_model_len=256)
    with pytest.raises(ContextLengthExceededError, match="100 text tokens.* 64"):
        world.submit(prompt(100))
    for n in range(10):
        world.submit(prompt(6, base=n))
    world.run()
    assert len(world.done) == 10


def test_images_that_can_never_be_held_together_are_refused_with_the_numbers() -> None:
    world = World(vision_pages=3)
    with pytest.raises(ContextLengthExceededError, match=r"2 images need 4 .* has 3"):
        world.submit(prompt(2, image(0), 2, image(1), 2))
    world.submit(prompt(2, image(0), 2, image(0), 2))  # one image twice is one image
    world.run()


def test_a_prompt_as_long_as_the_context_is_refused_with_the_numbers() -> None:
    world = World(max_model_len=20)
    with pytest.raises(ContextLengthExceededError, match=r"20 tokens \(6 of them.* 20"):
        world.submit(prompt(14, image(0)))
    world.submit(prompt(13, image(0)), 1)
    world.submit(prompt(13, image(0), 1), prefill_only=True)
    world.run()


def test_a_prompt_that_fills_the_pool_but_one_slot_runs() -> None:
    world = World(text_pages=4)
    world.submit(prompt(15), 1)
    world.run()
    with pytest.raises(ContextLengthExceededError):
        world.submit(prompt(16), 1)


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("at", [1, 3, 4, 5, 8])
def test_text_behind_an_image_waits_for_it_whatever_the_chunks(budget: int, at: int) -> None:
    config = SchedulerConfig(max_num_batched_tokens=budget, max_images_per_step=1)
    world = World(config=config)
    world.submit(prompt(at, image(0), image(1), image(2), 5), 2)
    early = world.step()
    assert sum(c.count for c in early.chunks) == min(at, budget)
    world.run()
    world.assert_right()


def test_a_preempted_sequence_resumes_and_ends_as_if_nothing_had_been() -> None:
    world = World(text_pages=8, config=SchedulerConfig(max_num_batched_tokens=16))
    seqs = [world.submit(prompt(7, image(n), 2, base=40 * n), 14) for n in range(3)]
    world.run()
    world.assert_right()
    world.assert_idle()
    assert world.preemptions > 0
    assert [s.id for s in world.done] == [s.id for s in seqs], "the earlier ones do not wait"


def test_the_earliest_request_moves_at_every_step() -> None:
    world = World(text_pages=7, config=SchedulerConfig(max_num_batched_tokens=9))
    first = world.submit(prompt(9, base=1), 15)
    for n in range(1, 5):
        world.submit(prompt(9, base=40 * n), 15)
    while not first.finished:
        assert first in [c.seq for c in world.step().chunks]


def test_a_long_prompt_does_not_hold_back_a_running_answer() -> None:
    world = World(text_pages=64, config=SchedulerConfig(max_num_batched_tokens=4))
    answer = world.submit(prompt(3), 20)
    world.step()
    world.submit(prompt(100, base=200))
    while not answer.finished:
        assert answer in [c.seq for c in world.step().chunks]


def waits_for_images(text: int) -> tuple[Segment, ...]:
    """A prompt that for five steps, at one encoder run each, has nothing to compute."""
    return prompt(1, *(image(n, 4) for n in range(5)), text, base=200)


def test_an_earlier_prompt_that_comes_late_does_not_hold_back_a_running_answer() -> None:
    config = SchedulerConfig(max_num_batched_tokens=4, max_images_per_step=1)
    world = World(config=config)
    world.submit(waits_for_images(60))
    answer = world.submit(prompt(3), 18)
    world.step()
    while not answer.finished:
        assert answer in [c.seq for c in world.step().chunks]


def test_a_sequence_preempted_within_a_step_is_not_part_of_it() -> None:
    """The later one has its next token planned when the earlier one takes its pages."""
    config = SchedulerConfig(max_num_batched_tokens=64, max_images_per_step=1)
    world = World(text_pages=7, vision_pages=8, config=config)
    first = world.submit(waits_for_images(20), 2)
    later = world.submit(prompt(6), 20)
    while not world.preemptions:
        batch = world.step()
    assert [c.seq for c in batch.chunks] == [first] and later.status is SequenceStatus.PREEMPTED
    world.run()
    world.assert_right()
    world.assert_idle()


def test_a_second_turn_finds_the_first_ones_pages_and_images() -> None:
    world = World()
    first = prompt(9, image(0), 9)
    seq = world.submit(first, 4)
    world.run()
    longer = (*first, TextSegment(tuple(seq.output_token_ids)), *prompt(3, base=900))
    again = world.submit(longer)
    world.step()
    # Of the first turn's 22 tokens the last was never computed.
    assert again.num_cached_tokens == 21 // PAGE * PAGE and not again.missing_images
    world.run()
    world.assert_right()
    assert world.encoded == [image(0).digest]


def test_what_had_no_room_is_admitted_once_another_has_cached_its_beginning() -> None:
    world = World(text_pages=8)
    world.submit(prompt(20), 9)
    again = world.submit(prompt(20), 1)
    world.step()
    assert again.status is SequenceStatus.WAITING
    world.step()
    assert again.num_cached_tokens == 16
    world.run()
    world.assert_right()


def test_a_sequence_preempted_with_a_pending_token_goes_on_with_it() -> None:
    world = World(text_pages=6, overlaps=True)
    seqs = [world.submit(prompt(7, base=50 * n), 9) for n in range(2)]
    while seqs[1].status is not SequenceStatus.PREEMPTED:
        pending = {seq.id for seq, _ in world.flight}
        world.step()
    assert seqs[1].id in pending
    world.run()
    world.assert_right()
    world.assert_idle()


def test_the_same_text_behind_another_image_is_not_found() -> None:
    world = World()
    world.submit(prompt(8, image(0), 8))
    world.run()
    other = world.submit(prompt(8, image(1), 8))
    world.run()
    assert other.num_cached_tokens == 8
    world.assert_right()


def steps_to_finish(world: World, answer_to: tuple[Segment, ...]) -> list[int]:
    """Submit a real turn; at which step from then each of its tokens came."""
    seq, times = world.submit(answer_to, 5), []
    start = world.steps
    while not seq.finished:
        before = seq.num_output_tokens
        world.step()
        times += [world.steps - start] * (seq.num_output_tokens - before)
    return times


@pytest.mark.parametrize("head_start", [0, 1, 2, 5])
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_seqs": 2},
        {"max_images_per_step": 1},
        {"max_num_batched_tokens": 5},
    ],
)
def test_prefills_without_output_never_delay_a_real_turn(
    limits: dict[str, int], head_start: int
) -> None:
    """Not by the step's tokens, seats, encoder runs, nor by pages they hold."""
    config = SchedulerConfig(**{"max_num_batched_tokens": 16, **limits})
    real = prompt(20, image(0), 12, image(1), 3)
    alone = steps_to_finish(World(text_pages=24, vision_pages=8, config=config), real)
    world = World(text_pages=24, vision_pages=8, config=config)
    for n in range(6):
        images = image(10 + 2 * n), image(11 + 2 * n)
        world.submit(prompt(30, *images, 20, base=100 + 80 * n), prefill_only=True)
    for _ in range(head_start):
        world.step()
    assert steps_to_finish(world, real) == alone
    world.run()
    world.assert_right()
    world.assert_idle()
    assert sum(s.request.prefill_only for s in world.done) == 6


def test_a_preempted_sequence_takes_its_encoder_run_with_it() -> None:
    """The later one has asked for its third image when it finds that no page is left for it.

    Its vision pages are free again by the end of the same decision, so nothing may write to them.
    """
    config = SchedulerConfig(max_num_batched_tokens=16, max_images_per_step=1)
    world = World(text_pages=3, vision_pages=6, config=config)
    world.submit(prompt(4), 8)
    later = world.submit(prompt(1, image(0), 1, image(1), 1, image(2), 5, base=90), 1)
    world.step()
    world.step()
    assert not world.step().images and later.status is SequenceStatus.PREEMPTED
    world.run()
    world.assert_right()
    world.assert_idle()


def test_a_preempted_prefill_queues_behind_waiting_real_turns() -> None:
    world = World(text_pages=6, config=SchedulerConfig(max_num_seqs=2))
    prefill = world.submit(prompt(16, base=100), prefill_only=True)
    answer = world.submit(prompt(9), 12)
    later = world.submit(prompt(12, base=300), 9)
    world.run()
    assert world.preemptions and [s.id for s in world.done] == [answer.id, later.id, prefill.id]
    world.assert_right()


@pytest.mark.parametrize(
    "status", [SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.PREEMPTED]
)
def test_an_abort_in_any_state_gives_everything_back(status: SequenceStatus) -> None:
    world = World(text_pages=7, config=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=9))
    for n in range(4):
        world.submit(prompt(6, image(n), 3, base=40 * n), 14)
    victims: list[Sequence] = []
    while not victims:
        world.step()
        victims = [s for s in world.live if s.status is status]
    world.abort(victims[0])
    assert victims[0].finished and not any(victims[0].tables)
    world.run()
    world.assert_right()
    world.assert_idle()


def test_aborts_while_everything_runs_leave_nothing_behind() -> None:
    world = World(text_pages=12, vision_pages=6, config=SchedulerConfig(max_num_seqs=4))
    for n in range(40):
        seq = world.submit(prompt(5 + n % 7, image(n % 5), 3, base=30 * n), 9)
        world.step()
        if n % 2:
            world.abort(seq)
        elif n % 3 == 0:
            world.abort(world.live[0])
    world.run()
    world.assert_right()
    world.assert_idle()


def test_a_failed_image_ends_its_holders_and_no_others() -> None:
    world = World(failing={image(0).digest})
    bad = world.submit(prompt(3, image(0), 2, image(1), 2))
    good = world.submit(prompt(3, image(1), 2, image(2), 2, base=50))
    lonely = world.submit(prompt(3, image(0), 2, image(3), 2, base=90))
    world.run()
    assert world.failed == [bad, lonely] and world.done == [good]
    assert world.vision[0].lookup(image(0).digest) is None
    assert world.vision[0].lookup(image(3).digest) is None, "its only holder has gone"
    world.failing.clear()
    world.submit(prompt(3, image(0), 2))
    world.run()
    world.assert_right()
    world.assert_idle()

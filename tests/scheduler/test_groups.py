"""Windows, mixed layer groups, cross attention and images in context, under any traffic."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.cache.layer_group import LayerGroup
from mmserve.config import SchedulerConfig
from mmserve.errors import ContextLengthExceededError
from mmserve.request import ImageInput, Segment, TextSegment
from mmserve.scheduler.batch import Batch
from mmserve.sequence import SequenceStatus
from tests.scheduler.memory import PAGE
from tests.scheduler.world import FULL, World, image, prompt

IMAGES = [image(n, tokens) for n, tokens in enumerate((6, 6, 1, 4, 5, 9, 17, 6))]
SELF, CROSS = LayerGroup((0,), images=False), LayerGroup((1,), text=False)


def window(size: int) -> LayerGroup:
    return LayerGroup((1,), window=size)


WINDOWS = st.sampled_from([1, 2, 4, 5, 9, 16, 40]).map(window)
GROUPS = st.one_of(
    st.just((FULL,)),
    st.tuples(WINDOWS),
    st.tuples(st.just(FULL), WINDOWS),
    st.tuples(WINDOWS, st.just(FULL), WINDOWS),
    st.just((SELF, CROSS)),
)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    in_context = draw(st.booleans())
    return World(
        text_pages=draw(st.integers(3, 24)),
        vision_pages=draw(st.integers(3, 12)),
        config=SchedulerConfig(
            max_num_seqs=draw(st.integers(1, 5)),
            max_num_batched_tokens=draw(st.sampled_from([1, 2, 3, 7, 16, 64])),
            max_images_per_step=draw(st.integers(1, 3)),
        ),
        prefix_caching=draw(st.booleans()),
        overlaps=draw(st.booleans()),
        groups=draw(GROUPS),
        in_context=in_context,
        whole_prompts=in_context and draw(st.sampled_from([False, False, True])),
    )


@st.composite
def prompts(draw: st.DrawFn) -> tuple[Segment, ...]:
    """Text, images, text ..., always with text at the end, often sharing beginnings."""
    parts: list[int | ImageInput] = []
    for _ in range(draw(st.integers(0, 3))):
        parts.append(draw(st.integers(0, 9)))
        parts += draw(st.lists(st.sampled_from(IMAGES), max_size=2))
    return prompt(*parts, draw(st.integers(1, 12)), base=draw(st.sampled_from([0, 0, 0, 500])))


TURNS = st.tuples(
    prompts(),
    st.integers(1, 14),
    st.booleans(),  # prefill only, when the next one is, too
    st.integers(0, 6),  # steps before the next
    st.sampled_from([None, None, None, 0, 1, 3]),  # who is aborted then
)


@given(worlds(), st.lists(TURNS, min_size=1, max_size=9))
@settings(max_examples=250, deadline=None)
def test_whatever_the_layers_every_row_reads_what_it_should_and_all_is_given_back(
    world: World, turns: list[tuple[tuple[Segment, ...], int, bool, int, int | None]]
) -> None:
    for segments, count, ahead, steps, victim in turns:
        text = sum(len(getattr(s, "token_ids", ())) for s in segments)
        room = world.scheduler.text_capacity - text
        try:
            world.submit(segments, max(min(count, room), 1), prefill_only=ahead)
        except ContextLengthExceededError:
            continue
        for _ in range(steps):
            world.step()
        if victim is not None and world.live:
            world.abort(world.live[victim % len(world.live)])
    world.run()
    world.assert_right()
    world.assert_idle()


# -- windows --------------------------------------------------------------------------------------


def test_an_answer_of_any_length_needs_no_more_of_a_windows_pool() -> None:
    world = World(text_pages=4, groups=(window(8),), prefix_caching=False)
    seq = world.submit(prompt(5), 300)
    most = 0
    while not seq.finished:
        world.step()
        most = max(most, world.text[0].num_pages - world.text[0].num_free)
    assert most == 3
    world.assert_right()
    world.assert_idle()


def test_a_prompt_longer_than_a_windows_pool_runs_in_steps_that_fit() -> None:
    config = SchedulerConfig(max_num_batched_tokens=64)
    world = World(text_pages=5, groups=(window(8),), config=config)
    seq = world.submit(prompt(100), 3)
    counts = [world.step().chunks[0].count for _ in range(4)]
    assert counts == [20, 8, 8, 8]
    world.run()
    assert seq in world.done
    world.assert_right()


def test_layers_that_see_everything_keep_what_the_window_gave_back() -> None:
    world = World(groups=(FULL, window(6)))
    seq = world.submit(prompt(30), 20)
    for _ in range(10):
        world.step()
    held = [sum(page >= 0 for page in table) for table in seq.tables]
    assert held == [10, 3]
    world.run()
    world.assert_right()
    world.assert_idle()


def test_an_image_that_a_window_has_passed_is_free_there_and_held_where_it_is_read() -> None:
    world = World(groups=(FULL, window(6)))
    seq = world.submit(prompt(2, image(0), 3), 20)
    world.step()
    assert seq.images[0].pages == [[0, 1], [0, 1]]
    for _ in range(4):
        world.step()
    assert seq.images[0].pages == [[0, 1], []]
    assert [index.num_referenced for index in world.vision] == [2, 0]
    world.run()
    world.assert_right()


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("said", range(6, 12))
@pytest.mark.parametrize("size", [2, 6, 8, 9])
def test_a_next_turn_is_found_where_the_last_one_ended(
    size: int, said: int, overlaps: bool
) -> None:
    world = World(groups=(FULL, window(size)), overlaps=overlaps)
    seq = world.submit(prompt(30), said)
    world.run()
    answer = TextSegment(tuple(seq.output_token_ids))
    again = world.submit((*prompt(30), answer, *prompt(5, base=900)))
    world.step()
    assert again.num_cached_tokens == (29 + said) // PAGE * PAGE
    world.run()
    world.assert_right()


def test_a_beginning_that_many_share_is_found_in_the_midst_of_a_prompt() -> None:
    """A window's pages are stored before they are given back."""
    world = World(groups=(FULL, window(6)), config=SchedulerConfig(max_num_batched_tokens=8))
    world.submit(prompt(16, 20), 1)
    world.run()
    again = world.submit((*prompt(16), *prompt(9, base=700)))
    world.step()
    assert again.num_cached_tokens == 16
    world.run()
    world.assert_right()


def test_a_beginning_is_not_found_where_its_window_is_gone() -> None:
    world = World(groups=(FULL, window(6)))
    world.submit(prompt(16), 1)
    world.run()
    assert world.radix is not None and world.radix.evict(1, 99) == 4
    again = world.submit((*prompt(16), *prompt(9, base=700)))
    world.step()
    assert again.num_cached_tokens == 0
    world.run()
    world.assert_right()


@pytest.mark.parametrize(
    ("groups", "pools"),
    [
        ((window(8), FULL), "the text KV pool of layer group 1 holds 20"),
        ((FULL, window(40)), "the text KV pool of layer group 0 holds 20"),
        (
            (window(40), window(40)),
            r"the text KV pool of layer group 0 \(a window of 40\) holds 20",
        ),
        ((window(8), window(8)), None),
    ],
)
def test_a_prompt_is_refused_by_the_pool_that_cannot_hold_it(
    groups: tuple[LayerGroup, ...], pools: str | None
) -> None:
    world = World(text_pages=5, groups=groups)
    if pools is None:
        world.submit(prompt(20))
    else:
        with pytest.raises(ContextLengthExceededError, match=f"20 text tokens; {pools}"):
            world.submit(prompt(20))
    world.run()


def test_images_are_refused_by_the_layers_that_look_at_them() -> None:
    world = World(vision_pages=3, groups=(SELF, CROSS))
    with pytest.raises(ContextLengthExceededError, match="need 4 .*of layer group 1 has 3"):
        world.submit(prompt(2, image(0), 2, image(1), 2))


# -- images in their context ----------------------------------------------------------------------


def rows(batch: Batch) -> list[tuple[str, int, int, list[int]]]:
    """Sequence, first text token, text tokens and images (by their text index) of each chunk."""
    return [
        (c.seq.id, c.start, c.count, [x.placed.text_index for x in c.images]) for c in batch.chunks
    ]


def contexts(budget: int = 64, **options: object) -> World:
    config = SchedulerConfig(max_num_batched_tokens=budget)
    return World(config=config, in_context=True, **options)  # type: ignore[arg-type]


def test_images_are_computed_in_order_between_their_text_and_never_encoded_alone() -> None:
    world = contexts()
    world.submit(prompt(5, image(0), 4, image(1), 3))
    batch = world.step()
    assert rows(batch) == [("1", 0, 12, [5, 9])] and not batch.images
    assert batch.num_tokens == 12 + 6 + 6
    world.run()
    world.assert_right()


def test_an_image_is_never_split_and_waits_for_a_step_with_room() -> None:
    world = contexts(budget=8)
    world.submit(prompt(5, image(0), 4, image(1), 3), 1)
    assert [rows(world.step())[0][2:] for _ in range(4)] == [
        (5, []),
        (2, [5]),
        (2, [9]),
        (3, []),
    ]
    world.run()
    world.assert_right()


def test_a_chunk_may_be_an_image_alone_and_exceed_the_budget_if_the_image_does() -> None:
    world = contexts(budget=4)
    world.submit(prompt(2, image(0), 3), 1)
    assert [rows(world.step())[0][1:] for _ in range(3)] == [
        (0, 2, []),
        (2, 0, [2]),
        (2, 3, []),
    ]
    world.assert_right()


def test_a_large_image_does_not_wait_for_ever_beside_answers_nor_do_they_wait_for_it() -> None:
    world = contexts(budget=7)
    answer = world.submit(prompt(3), 9)
    world.step()
    world.submit(prompt(1, image(0, 7), image(1, 9), 1, base=50))
    steps = [rows(world.step()) for _ in range(3)]
    assert all(step[0] == (answer.id, 3 + n, 1, []) for n, step in enumerate(steps))
    assert [step[1][2:] for step in steps] == [(1, []), (0, [1]), (0, [1])]
    world.run()
    world.assert_right()


def test_two_large_images_of_two_prompts_take_turns() -> None:
    world = contexts(budget=4)
    for n in range(2):
        world.submit(prompt(image(n), 2, base=40 * n))
    assert [[c.seq.id for c in world.step().chunks] for _ in range(2)] == [["1"], ["1"]]
    world.run()
    world.assert_right()


def test_the_same_image_behind_other_text_is_another_one_and_behind_the_same_it_is_found() -> None:
    world = contexts()
    for base in (0, 0, 500):
        world.submit(prompt(5, image(0), 4, base=base))
        world.run()
    assert len(world.encoded) == len(set(world.encoded)) == 2
    world.assert_right()


def test_an_image_that_is_forgotten_is_computed_again_and_the_text_behind_it_is_not() -> None:
    world = contexts()
    segments = prompt(5, image(0), 11)
    world.submit(segments, 1)
    world.run()
    world.vision[0].clear()
    again = world.submit(segments, 1)
    assert rows(world.step()) == [(again.id, 12, 4, [5])]
    world.assert_right()
    assert len(world.encoded) == 2


def test_with_a_window_text_is_found_up_to_the_image_that_is_forgotten() -> None:
    world = contexts(groups=(FULL, window(6)))
    segments = prompt(5, image(0), 11)
    world.submit(segments, 1)
    world.run()
    world.vision[0].clear()
    again = world.submit(segments, 1)
    assert rows(world.step()) == [(again.id, 4, 12, [5])]
    world.assert_right()


def test_an_image_is_written_only_where_it_is_missing() -> None:
    world = contexts(groups=(FULL, window(40)))
    segments = prompt(5, image(0), 11)
    world.submit(segments, 1)
    world.run()
    world.vision[1].clear()
    world.submit(segments, 1)
    (context,) = world.step().chunks[0].images
    assert context.writes == (False, True)
    world.assert_right()


def test_an_image_lost_where_no_row_to_come_reads_it_is_not_computed() -> None:
    world = contexts(groups=(FULL, window(6)))
    segments = prompt(5, image(0), 14)
    world.submit(segments, 1)
    world.run()
    world.vision[1].clear()
    again = world.submit(segments, 1)
    assert rows(world.step()) == [(again.id, 16, 3, [])]
    world.assert_right()


def test_of_two_that_need_an_image_one_computes_it_and_the_other_waits() -> None:
    world = contexts()
    segments = prompt(5, image(0), 4)
    first, second = (world.submit(segments, 2) for _ in range(2))
    assert rows(world.step()) == [(first.id, 0, 9, [5]), (second.id, 0, 5, [])]
    assert (second.id, 5, 4, []) in rows(world.step())
    world.run()
    world.assert_right()
    assert len(world.encoded) == 1


@pytest.mark.parametrize("budget", [5, 6])
def test_who_else_holds_an_image_computes_it_when_the_first_has_gone(budget: int) -> None:
    world = contexts(budget=budget)
    segments = prompt(5, image(0), 4)
    first, second = (world.submit(segments, 2) for _ in range(2))
    world.step()
    world.step() if budget == 6 else None
    world.abort(first)
    world.run()
    world.assert_right()
    assert second in world.done and len(world.encoded) == 1


def test_an_image_whose_sequence_was_preempted_before_it_is_computed_once_afterwards() -> None:
    world = contexts(budget=3, text_pages=8, prefix_caching=False)
    for n in range(2):
        world.submit(prompt(3, base=20 * n), 20)
    late = world.submit(prompt(9, image(0), 4, base=90), 2)
    while late.status is not SequenceStatus.PREEMPTED:
        world.step()
    assert not world.encoded and not world.vision[0].num_used
    world.run()
    assert len(world.encoded) == 1
    world.assert_right()
    world.assert_idle()


# -- prompts that see themselves ------------------------------------------------------------------


def wholes(budget: int = 64, **options: object) -> World:
    return contexts(budget, whole_prompts=True, **options)


@pytest.mark.parametrize("budget", [4, 64])
def test_a_whole_prompt_is_computed_at_once_whatever_the_budget(budget: int) -> None:
    world = wholes(budget)
    world.submit(prompt(image(0), image(1), 9))
    assert rows(world.step()) == [("1", 0, 9, [0, 0])]
    world.run()
    world.assert_right()


def test_whole_prompts_wait_for_a_step_with_room() -> None:
    world = wholes(budget=20)
    for n in range(3):
        world.submit(prompt(image(n), 9, base=50 * n), 1)
    assert [[c.seq.id for c in world.step().chunks] for _ in range(3)] == [["1"], ["2"], ["3"]]
    world.assert_right()


def test_only_the_same_prompt_is_found_again() -> None:
    world = wholes()
    for segments, cached in (
        (prompt(image(0), 17), 0),
        (prompt(image(0), 17), 16),
        (prompt(image(0), 18), 0),
        (prompt(image(1), 17), 0),
    ):
        seq = world.submit(segments, 2)
        world.run()
        assert seq.num_cached_tokens == cached
    assert len(world.encoded) == 3
    world.assert_right()

"""Layer groups: any mix of them under any traffic, and windows one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.cache.layer_group import LayerGroup
from mmserve.config import SchedulerConfig
from mmserve.errors import ContextLengthExceededError
from mmserve.request import ImageInput, Segment, TextSegment
from tests.scheduler.memory import PAGE
from tests.scheduler.world import CROSS, FULL, SELF, World, image, prompt, window

IMAGES = [image(n, tokens) for n, tokens in enumerate((6, 6, 1, 4, 5, 9, 17, 6))]
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
    whole_prompts = in_context and draw(st.sampled_from([False, False, True]))
    heads = st.sampled_from([None, None, 1, 4, 5])
    return World(
        text_pages=draw(st.integers(3, 24)),
        vision_pages=draw(st.integers(3, 12)),
        config=SchedulerConfig(
            max_num_seqs=draw(st.integers(1, 5)),
            max_num_batched_tokens=draw(st.sampled_from([1, 2, 3, 7, 16, 64])),
            max_images_per_step=draw(st.integers(1, 3)),
        ),
        prefix_caching=draw(st.booleans()),
        failing={i.digest for i in draw(st.lists(st.sampled_from(IMAGES[3:5]), max_size=1))},
        overlaps=draw(st.booleans()),
        groups=draw(GROUPS),
        in_context=in_context,
        whole_prompts=whole_prompts,
        head=draw(heads) if in_context and not whole_prompts else None,
    )


@st.composite
def prompts(draw: st.DrawFn) -> tuple[Segment, ...]:
    """Text, images, text ..., nearly always with text at the end, often sharing beginnings."""
    parts: list[int | ImageInput] = []
    for _ in range(draw(st.integers(0, 3))):
        parts.append(draw(st.integers(0, 9)))
        parts += draw(st.lists(st.sampled_from(IMAGES), max_size=2))
    parts.append(draw(st.integers(1, 12)))
    if draw(st.sampled_from([False, False, False, True])):
        parts.append(draw(st.sampled_from(IMAGES)))
    return prompt(*parts, base=draw(st.sampled_from([0, 0, 0, 500])))


TURNS = st.tuples(
    prompts(),
    st.integers(1, 14),
    st.booleans(),  # prefill only, when the next one is, too
    st.integers(0, 6),  # steps before the next
    st.sampled_from([None, None, None, 0, 1, 3]),  # who is aborted then
)


@given(worlds(), st.lists(TURNS, min_size=1, max_size=9))
@settings(max_examples=150, deadline=None)
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

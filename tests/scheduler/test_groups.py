"""Windows, mixed layer groups, cross attention and images in context, under any traffic."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.cache.layer_group import LayerGroup
from mmserve.config import SchedulerConfig
from mmserve.errors import ContextLengthExceededError
from mmserve.request import ImageInput, Segment
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

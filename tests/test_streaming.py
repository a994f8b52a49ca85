"""What stays when the oldest text is dropped, and where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.request import ImageInput, ImageSegment, Segment, Streaming, TextSegment
from mmserve.streaming import cut


def image(name: str) -> ImageInput:
    return ImageInput(name.encode(), b"", 4)


def segments(*parts: int | str) -> tuple[Segment, ...]:
    """A number is so many text tokens, counted through; a letter an image, in brackets marked."""
    out: list[Segment] = []
    at = 0
    for part in parts:
        if isinstance(part, str):
            out.append(ImageSegment(image(part[-2:][0] if "(" in part else part), "(" in part))
        else:
            out.append(TextSegment(tuple(range(at, at + part))))
            at += part
    return tuple(out)


def flat(parts: tuple[Segment, ...]) -> list[int | str]:
    out: list[int | str] = []
    for segment in parts:
        if isinstance(segment, TextSegment):
            out += segment.token_ids
        else:
            out.append(segment.image.digest.decode())
    return out


PROMPT = segments(6, "a", 4, "b", "(m)", 10, "c", 5)


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (None, [0, 1, 2, "a", "b", "c", 22, 23, 24]),
        (2, [0, 1, 2, "b", "c", 22, 23, 24]),
        (0, [0, 1, 2, 22, 23, 24]),
        (frozenset([b"a", b"elsewhere"]), [0, 1, 2, "a", 22, 23, 24]),
    ],
)
def test_kept_images_stand_between_the_sinks_and_the_newest_text(
    images: frozenset[bytes] | int | None, expected: list[int | str]
) -> None:
    rest = cut(PROMPT, Streaming(20, 3, 3, images), 3)
    assert flat(rest.segments) == expected
    assert rest.dropped_tokens == 19
    assert rest.dropped_images == 3 - sum(isinstance(x, str) for x in expected)


@pytest.mark.parametrize("images", [0, frozenset[bytes]()])
def test_an_image_stays_where_the_text_around_it_stays(images: frozenset[bytes] | int) -> None:
    # "c" stands before the first kept token, and "a" among the sinks.
    rest = cut(PROMPT, Streaming(20, 7, 5, images), 5)
    assert flat(rest.segments) == [*range(6), "a", 6, "c", *range(20, 25)]
    assert rest.dropped_images == 1


@given(
    st.lists(st.one_of(st.integers(1, 9), st.sampled_from("abcde")), min_size=1, max_size=8),
    st.integers(0, 12),
    st.integers(1, 12),
    st.sampled_from([None, 0, 1, 2, frozenset([b"a", b"c"])]),
)
def test_what_stays_is_what_stood_there_in_its_order_and_the_counts_are_the_rest(
    parts: list[int | str], sinks: int, keep: int, images: frozenset[bytes] | int | None
) -> None:
    whole = segments(*parts)
    before = flat(whole)
    count = sum(isinstance(token, int) for token in before)
    if sinks + keep > count:
        return
    rest = cut(whole, Streaming(count, sinks, keep, images), keep)
    after = flat(rest.segments)
    texts = [token for token in after if isinstance(token, int)]
    assert texts == [*range(sinks), *range(count - keep, count)]
    assert len(texts) + rest.dropped_tokens == count
    assert len(before) - len(after) == rest.dropped_tokens + rest.dropped_images
    left = iter(before)
    assert all(token in left for token in after), "the order has changed"

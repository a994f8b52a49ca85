"""Earlier places of a text's end, against looking through all of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mmserve.spec.index import Index, Place

TEXTS = st.lists(st.integers(0, 2), max_size=40)


def looked_through(
    tokens: list[int], text: list[int], sizes: list[int], longest: int
) -> list[Place]:
    """Places of `tokens`, newest first, where as much as the largest size with any is equal."""
    places = []
    for at in reversed(range(len(tokens))):
        matched = 0
        while (
            matched < min(at, len(text), longest) and tokens[at - matched - 1] == text[-matched - 1]
        ):
            matched += 1
        places.append(Place(at, matched))
    for size in reversed(sizes):
        if found := [place for place in places if place.matched >= size]:
            return found
    return []


@given(TEXTS, TEXTS, st.sampled_from([[1], [2], [1, 3], [2, 5]]), st.integers(5, 9))
def test_all_places_are_found_newest_first(
    tokens: list[int], text: list[int], sizes: list[int], longest: int
) -> None:
    index = Index(tokens, sizes)
    index.grow()
    assert list(index.search(text, longest, 100)) == looked_through(tokens, text, sizes, longest)


@given(TEXTS, st.lists(st.integers(1, 5)))
def test_a_text_that_grew_piece_by_piece_is_found_like_one_that_was_there_at_once(
    tokens: list[int], pieces: list[int]
) -> None:
    grown: list[int] = []
    index = Index(grown, [1, 3])
    for piece in pieces:
        grown.extend(tokens[len(grown) : len(grown) + piece])
        index.grow(2)
    grown.extend(tokens[len(grown) :])
    index.grow()
    assert list(index.search(grown, 8, 100)) == looked_through(tokens, tokens, [1, 3], 8)


def test_a_search_looks_at_so_many_candidates_only() -> None:
    index = Index([1, 2] * 100, [2])
    index.grow()
    assert [place.at for place in index.search([1, 2], 8, 3)] == [198, 196, 194]

"""Prompt lookup: the longest earlier match, the newest of them, and what followed it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mmserve.spec.draft import Draft
from mmserve.spec.drafter import Context, Landed, Wanted
from mmserve.spec.ngram import NgramDrafter


def guess(tokens: list[int], length: int = 4, shortest: int = 2, longest: int = 4) -> list[int]:
    drafter = NgramDrafter(shortest, longest)
    [draft] = drafter.propose([Wanted(Context("a", tokens, len(tokens)), length)])
    return list(draft.tokens) if draft else []


def test_what_followed_the_same_tokens_is_guessed() -> None:
    assert guess([1, 2, 3, 4, 5, 6, 7, 1, 2]) == [3, 4, 5, 6]


def test_a_longer_match_beats_a_newer_one() -> None:
    assert guess([9, 1, 2, 5, 0, 1, 2, 6, 9, 1, 2], length=1) == [5]
    assert guess([0, 1, 2, 5, 0, 1, 2, 6, 0, 1, 2], length=1) == [6]


def test_less_than_the_shortest_match_is_none() -> None:
    assert guess([1, 2, 3, 0, 2]) == [] and guess([1, 2, 3, 0, 2], shortest=1) == [3, 0, 2, 3]
    assert guess([]) == [] and guess([1]) == []


def test_a_text_that_repeats_itself_is_taken_to_go_on() -> None:
    assert guess([7, 8, 9, 7, 8, 9, 7, 8], length=7) == [9, 7, 8, 9, 7, 8, 9]
    assert guess([5, 5, 5], length=6) == [5] * 6


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 8))
def test_a_guess_made_step_by_step_is_the_one_made_at_once(tokens: list[int], length: int) -> None:
    drafter = NgramDrafter(2, 4)
    known = tokens[:1]
    context = Context("a", known, 1)
    for token in tokens[1:]:
        known.append(token)
        drafter.landed(context, Landed(None, (token,), ()))
    [draft] = drafter.propose([Wanted(context, length)])
    assert (list(draft.tokens) if draft else []) == guess(tokens, length)
    assert draft is None or (draft.is_chain and len(draft) == length)


def test_a_long_prompt_is_taken_in_while_it_is_computed() -> None:
    drafter = NgramDrafter(2, 4)
    context = Context("a", [1, 2, 3, 4, 1, 2], 6)
    drafter.landed(context, Landed(None, (), ()))
    assert drafter.propose([Wanted(context, 2)]) == [Draft.chain([3, 4])]


def test_sequences_do_not_see_each_other_and_leave_nothing_behind() -> None:
    drafter = NgramDrafter(2, 4)
    first = Context("a", [1, 2, 3, 4, 1, 2], 6)
    second = Context("b", [1, 2], 2)
    assert drafter.propose([Wanted(second, 2), Wanted(first, 2)]) == [None, Draft.chain([3, 4])]
    drafter.end(first)
    drafter.end(Context("never seen", [], 0))
    again = Context("a", [1, 2], 2)
    assert drafter.propose([Wanted(again, 2)]) == [None]


def test_a_text_is_recalled_where_its_longest_match_is() -> None:
    drafter = NgramDrafter(2, 4)

    def recalls(*tokens: int) -> bool:
        context = Context(str(tokens), list(tokens), 1)
        return drafter.recalls(context)

    assert recalls(1, 2, 3, 4, 5, 1, 2, 3, 4, -1)
    assert recalls(1, 2, 3, 4, 5, 1, 2, 3, 4)
    assert not recalls(1, 2, 3, 4, 5, 2, 3, 4, -1)
    assert not recalls(-1)

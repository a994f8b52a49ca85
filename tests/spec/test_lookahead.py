"""Lookahead: windows whose tokens the target itself chose, and what is learned from them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.spec.draft import Draft
from mmserve.spec.drafter import Context, Landed, Wanted
from mmserve.spec.lookahead import POOL, LookaheadDrafter

Target = Callable[[list[int]], int]


def checked(draft: Draft | None, tokens: list[int], target: Target) -> Landed:
    """What a target that always chooses the same makes of a draft; `tokens` grow by it."""
    texts = [list(tokens)]
    for token, parent in zip(*(draft.tokens, draft.parents) if draft else ((), ()), strict=True):
        texts.append([*texts[parent + 1], token])
    chosen = tuple(target(text) for text in texts)
    path: list[int] = []
    at = -1
    while draft and (number := draft.children(at).get(chosen[at + 1])) is not None:
        path.append(at := number)
    tokens.extend([*(draft.tokens[i] for i in path if draft), chosen[at + 1]])
    return Landed(draft, chosen, tuple(path))


def walk(
    drafter: LookaheadDrafter, target: Target, prompt: list[int], steps: int, length: int = 64
) -> list[int]:
    """Tokens known after each step."""
    tokens = list(prompt)
    context = Context("a", tokens, len(tokens))
    known = []
    for _ in range(steps):
        [draft] = drafter.propose([Wanted(context, length)])
        drafter.landed(context, checked(draft, tokens, target))
        known.append(len(tokens) - len(prompt))
    return known


def ring(size: int) -> Target:
    """Text that is a function of its last token, all different in one round."""
    return lambda tokens: (tokens[-1] * 3 + 1) % size


def place(text: list[int]) -> int:
    """Text whose tokens say how many stand before them: never the same one twice."""
    return len(text)


def test_a_token_that_is_on_its_way_is_no_guess() -> None:
    drafter, text = LookaheadDrafter(), [5, 6, 7, 8]
    context = Context("a", text, 1)
    drafter.propose([Wanted(context, drafter.length)])
    for step in range(40):
        text.append(-1)
        drafter.landed(context, Landed(None, (9,), ()))
        text[-1] = 9 + step % 3
    (draft,) = drafter.propose([Wanted(context, drafter.length)])
    assert draft is not None and min(draft.tokens) > 0


def test_what_was_never_said_is_known_before_it_is_said() -> None:
    assert walk(LookaheadDrafter(8, 5, 7), place, [0], 50)[-1] > 100


def test_a_text_that_goes_round_is_accepted_a_whole_gram_at_a_time() -> None:
    known = walk(LookaheadDrafter(8, 5, 7), ring(50), [5], 200)
    assert known[-1] - known[-2] >= 4


@given(
    st.integers(1, 4), st.integers(2, 5), st.integers(1, 4), st.integers(1, 12), st.integers(1, 9)
)
def test_the_text_is_the_targets_own_whatever_is_guessed(
    window: int, ngram: int, guesses: int, length: int, size: int
) -> None:
    target: Target = lambda tokens: (sum(tokens[-3:]) * 5 + 1) % size  # noqa: E731
    drafter = LookaheadDrafter(window, ngram, guesses)
    tokens = [0]
    context = Context("a", tokens, 1)
    for _ in range(20):
        [draft] = drafter.propose([Wanted(context, length)])
        assert draft is None or max(draft.depths) <= length
        drafter.landed(context, checked(draft, tokens, target))
    alone = [0]
    while len(alone) < len(tokens):
        alone.append(target(alone))
    assert tokens == alone


def test_a_columns_tokens_stand_where_they_are_guessed_to_stand() -> None:
    """With a target that says a token's place, every column comes right after some steps."""
    drafter = LookaheadDrafter(4, 4, 4)
    tokens = [0]
    context = Context("a", tokens, 1)
    for _ in range(12):
        [draft] = drafter.propose([Wanted(context, 64)])
        known = len(tokens)
        drafter.landed(context, checked(draft, tokens, place))
    assert draft and len(tokens) == known + drafter.length + 1
    assert all(t == known - 1 + d for t, d in zip(draft.tokens, draft.depths, strict=True))


def test_columns_keep_their_places_through_steps_without_a_draft() -> None:
    drafter = LookaheadDrafter(4, 2, 1)
    tokens = [0]
    context = Context("a", tokens, 1)
    [draft] = drafter.propose([Wanted(context, 64)])
    drafter.landed(context, checked(draft, tokens, place))
    assert drafter.propose([Wanted(context, 3)]) == [Draft.chain([2, 3, 4])]
    drafter.landed(context, checked(None, tokens, place))
    assert drafter.propose([Wanted(context, 3)]) == [Draft.chain([3, 4, 5])]
    tokens.append(3)  # of which it is not told
    [draft] = drafter.propose([Wanted(context, 3)])
    assert draft and draft.tokens[:2] == (4, 5)


def test_the_pool_is_bounded() -> None:
    drafter = LookaheadDrafter(8, 5, 7)
    tokens = [0]
    context = Context("a", tokens, 1)
    for step in range(POOL):
        drafter.propose([Wanted(context, 64)])
        tokens.append(step)
        drafter.landed(context, Landed(None, (step,), ()))
    tokens.extend(range(POOL, 2 * POOL))
    for _ in range(3):
        drafter.landed(context, Landed(None, tuple(tokens[-1:]), tuple(range(POOL))))
    ahead = drafter._ahead["a"]
    assert len(ahead.pool) == POOL and max(map(len, ahead.pool.values())) <= 7


def test_another_drafters_draft_teaches_nothing_wrong() -> None:
    drafter = LookaheadDrafter(4, 3, 4)
    tokens = [5, 6, 7]
    context = Context("a", tokens, 3)
    drafter.propose([Wanted(context, 64)])
    drafter.landed(context, checked(Draft.chain([99, 98]), tokens, ring(50)))
    assert drafter._ahead["a"].pool == {6: {(7, 22): None}}


@pytest.mark.parametrize("shape", [(8, 5, 9), (0, 5, 7), (8, 1, 7), (8, 5, 0)])
def test_a_window_that_no_draft_holds_is_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(AssertionError):
        LookaheadDrafter(*shape)


def test_an_ended_sequence_leaves_nothing_behind() -> None:
    drafter = LookaheadDrafter()
    walk(drafter, ring(50), [5], 5)
    drafter.end(Context("a", [], 0))
    drafter.end(Context("never seen", [], 0))
    assert not drafter._ahead

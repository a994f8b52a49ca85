"""Drafts as trees: who follows and who sees whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.spec.draft import MOST_TOKENS, Draft


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    """Any tree whose siblings differ."""
    count = draw(st.integers(1, 12))
    parents = [draw(st.integers(-1, i - 1)) for i in range(count)]
    return Draft(tuple(range(count)), tuple(parents))


@given(trees())
def test_a_token_sees_itself_and_what_its_parent_sees(draft: Draft) -> None:
    for i, (parent, mask) in enumerate(zip(draft.parents, draft.masks, strict=True)):
        assert mask == 1 << i | (draft.masks[parent] if parent >= 0 else 0)
        assert mask.bit_count() == draft.depths[i]


@given(trees(), st.integers(0, 12))
def test_a_shortened_draft_keeps_what_is_near(draft: Draft, length: int) -> None:
    short = draft.shortened(length)
    kept = [t for t, d in zip(draft.tokens, draft.depths, strict=True) if d <= length]
    assert (list(short.tokens) if short else []) == kept
    if short:
        assert max(short.depths) <= length
        old = [draft.tokens[p] if p >= 0 else -1 for p in draft.parents]
        new = [short.tokens[p] if p >= 0 else -1 for p in short.parents]
        assert new == [old[token] for token in short.tokens]


def test_a_chain_is_a_tree_without_branches() -> None:
    chain = Draft.chain([7, 8, 7])
    assert chain.is_chain and chain.depths == (1, 2, 3) and chain.masks == (1, 3, 7)
    assert chain.children(-1) == {7: 0} and chain.children(2) == {}
    assert not Draft((7, 8), (-1, -1)).is_chain


@pytest.mark.parametrize("parents", [(), (0,), (-1, 2, 1), (-2,), tuple(range(-1, MOST_TOKENS))])
def test_what_is_no_draft_is_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        Draft(tuple(range(len(parents))), parents)

"""Suffix decoding: earlier answers about the same picture, and how much of them is drafted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.spec.draft import Draft
from mmserve.spec.drafter import Context, Landed, Wanted
from mmserve.spec.suffix import BY_HEART, DOUBT, LEAST, SuffixDrafter

CAT, DOG = b"c" * 32, b"d" * 32
QUESTION, ANSWER = list(range(100, 140)), list(range(200, 220))


def answered(
    drafter: SuffixDrafter,
    question: list[int],
    answer: list[int],
    images: tuple[bytes, ...] = (CAT,),
    tenant: bytes = b"us",
) -> None:
    context = Context("earlier", [*question, *answer], len(question), images, tenant)
    drafter.end(context)


def guess(
    drafter: SuffixDrafter,
    tokens: list[int],
    length: int = 64,
    images: tuple[bytes, ...] = (CAT,),
    tenant: bytes = b"us",
) -> Draft | None:
    context = Context("asking", tokens, len(tokens), images, tenant)
    [draft] = drafter.propose([Wanted(context, length)])
    drafter._own.end(context)  # the next guess is of another sequence
    return draft


def test_the_same_question_about_the_same_picture_drafts_the_whole_answer() -> None:
    drafter = SuffixDrafter(1 << 20)
    assert guess(drafter, QUESTION) is None
    answered(drafter, QUESTION, ANSWER)
    assert guess(drafter, QUESTION) == Draft.chain(ANSWER)
    assert guess(drafter, [*QUESTION, *ANSWER[:7]]) == Draft.chain(ANSWER[7:])
    assert guess(drafter, QUESTION, length=5) == Draft.chain(ANSWER[:5])


def test_what_was_said_about_the_same_picture_counts_first() -> None:
    drafter = SuffixDrafter(1 << 20)
    answered(drafter, QUESTION, ANSWER)
    for word in range(9):
        answered(drafter, QUESTION, [word], images=(DOG,))
    assert guess(drafter, QUESTION) == Draft.chain(ANSWER)
    draft = guess(drafter, QUESTION, images=(DOG,))
    assert draft and draft.tokens[0] < 9


def test_what_was_said_about_other_pictures_counts_where_it_fits_better() -> None:
    drafter = SuffixDrafter(1 << 20)
    answered(drafter, QUESTION, ANSWER, images=(DOG,))
    assert guess(drafter, QUESTION) == Draft.chain(ANSWER)
    assert guess(drafter, QUESTION, images=()) == Draft.chain(ANSWER)
    answered(drafter, [50, 51, *QUESTION[-2:]], [1, 2, 3])
    assert guess(drafter, QUESTION) == Draft.chain(ANSWER)
    assert guess(drafter, [9, *QUESTION[-2:]]) == Draft.chain([1, 2])


def test_an_answer_in_the_presence_of_several_pictures_is_known_by_each() -> None:
    drafter = SuffixDrafter(1 << 20)
    answered(drafter, QUESTION, ANSWER, images=(CAT, DOG, CAT))
    assert guess(drafter, QUESTION, images=(DOG,)) == Draft.chain(ANSWER)
    assert guess(drafter, QUESTION, images=(b"x" * 32, CAT)) == Draft.chain(ANSWER)
    assert len(drafter._answers) == 3  # both, and anything at all


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=20), st.booleans())),
    st.lists(st.integers(0, 3), max_size=20),
    st.booleans(),
)
def test_other_tenants_answers_change_nothing(
    theirs: list[tuple[list[int], bool]], tokens: list[int], image: bool
) -> None:
    images = (CAT,) if image else ()
    alone, among = SuffixDrafter(1 << 20), SuffixDrafter(1 << 20)
    for drafter in (alone, among):
        answered(drafter, [0, 1], [2, 3, 0], images)
    for answer, about in theirs:
        answered(among, [0, 1], answer, (CAT,) if about else (), tenant=b"them")
    assert guess(among, tokens, images=images) == guess(alone, tokens, images=images)


def test_what_was_said_before_in_the_same_sequence_counts() -> None:
    draft = guess(SuffixDrafter(0), [5, 6, 7, 8, 9, 0, 5, 6], length=2)
    assert draft == Draft.chain([7, 8])


@pytest.mark.parametrize("matched", [2, 4, 8])
def test_a_draft_is_as_long_as_its_match_makes_it_likely(matched: int) -> None:
    drafter = SuffixDrafter(1 << 20)
    answered(drafter, QUESTION, ANSWER)
    draft = guess(drafter, [1, 2, 3, *QUESTION[-matched:]])
    likely, length = 1.0, 0
    while (likely := likely / (1 + DOUBT / (matched + length))) >= LEAST:
        length += 1
    assert draft == Draft.chain(ANSWER[:length])


def test_who_has_to_be_sure_keeps_still_where_the_match_is_short() -> None:
    drafter = SuffixDrafter(1 << 20, sure=0.6)
    answered(drafter, QUESTION, ANSWER)
    assert guess(drafter, [1, *QUESTION[-5:]]) is None
    assert guess(drafter, [1, *QUESTION[-6:]])
    answered(drafter, QUESTION, ANSWER)
    assert guess(drafter, [1, *QUESTION[-5:]])  # both say so


def test_what_most_answers_say_is_drafted() -> None:
    drafter = SuffixDrafter(1 << 20)
    for word in (7, 8, 8):
        answered(drafter, QUESTION, [5, word])
    assert guess(drafter, QUESTION) == Draft.chain([5, 8])


def test_where_answers_differ_too_much_nothing_is_drafted() -> None:
    drafter = SuffixDrafter(1 << 20, least=0.25)
    for word in range(5):
        answered(drafter, QUESTION, [5, word])
    assert guess(drafter, QUESTION) == Draft.chain([5])


def test_a_tree_holds_the_likeliest_tokens_wherever_they_hang() -> None:
    drafter = SuffixDrafter(1 << 20, width=2, least=0.1)
    for answer in ([5, 7, 1], [5, 8, 2], [5, 8, 2], [6]):
        answered(drafter, QUESTION, answer)
    draft = guess(drafter, QUESTION)
    assert draft == Draft((5, 8, 2, 6, 7, 1), (-1, 0, 1, -1, 0, 4))
    assert guess(drafter, QUESTION, length=3) == Draft.chain([5, 8, 2])


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), max_size=6),
    st.lists(st.integers(0, 2), max_size=20),
    st.integers(1, 8),
    st.integers(1, 3),
)
def test_every_draft_was_said_before(
    answers: list[list[int]], tokens: list[int], length: int, width: int
) -> None:
    drafter = SuffixDrafter(1 << 20, width=width)
    for answer in answers:
        answered(drafter, [0, 1], answer)
    draft = guess(drafter, tokens, length)
    if draft:
        assert len(draft) <= length and max(draft.depths) <= length
        texts = [tokens, *([0, 1, *answer] for answer in answers)]
        pairs = {pair for text in texts for pair in zip(text, text[1:], strict=False)}
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            before = draft.tokens[parent] if parent >= 0 else tokens[-1]
            assert (before, token) in pairs
            assert len(draft.children(parent)) <= width


def test_only_what_was_answered_is_remembered() -> None:
    drafter = SuffixDrafter(1 << 20)
    drafter.end(Context("a", QUESTION, len(QUESTION), (CAT,), b"us"))
    assert guess(drafter, QUESTION) is None and not len(drafter._answers)


def test_a_long_prompt_is_taken_in_while_it_is_computed() -> None:
    drafter = SuffixDrafter(0)
    context = Context("a", [1, 2, 3, 1, 2], 5)
    drafter.landed(context, Landed(None, (), ()))
    assert drafter.propose([Wanted(context, 1)]) == [Draft.chain([3])]
    drafter.end(context)


def recalls(drafter: SuffixDrafter, tokens: list[int], images: tuple[bytes, ...] = (CAT,)) -> bool:
    context = Context("asking", tokens, len(QUESTION), images, b"us")
    found = drafter.recalls(context)
    drafter._own.end(context)
    return found


def test_an_answer_about_the_same_picture_is_recalled_while_its_next_token_is_on_its_way() -> None:
    drafter = SuffixDrafter(1 << 20)
    assert not recalls(drafter, [*QUESTION, -1])
    answered(drafter, QUESTION, ANSWER)
    assert recalls(drafter, [*QUESTION, -1])
    assert recalls(drafter, [*QUESTION, *ANSWER[:7], -1])
    assert recalls(drafter, [*QUESTION, *ANSWER[:7]])
    assert not recalls(drafter, [*QUESTION, -1], images=(DOG,))
    assert not recalls(drafter, [*QUESTION, 9, 8, -1])


def test_without_pictures_any_answer_of_the_tenants_is_recalled_and_a_text_recalls_itself() -> None:
    drafter = SuffixDrafter(1 << 20)
    answered(drafter, QUESTION, ANSWER)
    assert recalls(drafter, [*QUESTION, -1], images=())
    once = [7 * n for n in range(BY_HEART + 1)]
    assert recalls(drafter, [*once, 5, *once[:BY_HEART], -1], images=(DOG,))
    assert not recalls(drafter, [*once, 5, *once[1:BY_HEART], -1], images=(DOG,))

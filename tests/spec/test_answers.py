"""Earlier answers by subject, within their memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mmserve.spec.answers import END, TOKEN_BYTES, Answers, Subject

CAT, DOG = Subject(b"us", b"cat"), Subject(b"us", b"dog")


def texts(answers: Answers, subject: Subject) -> list[int]:
    index = answers.about(subject)
    return list(index.tokens) if index else []


def test_an_answer_is_found_by_what_led_to_it() -> None:
    answers = Answers(1 << 20)
    answers.file(CAT, [1, 2, 3, 4])
    index = answers.about(CAT)
    assert index and [index.tokens[p.at] for p in index.search([9, 1, 2], 8, 8)] == [3]
    assert answers.about(DOG) is None


def test_what_nobody_asked_about_for_longest_goes_first() -> None:
    answers = Answers(10 * TOKEN_BYTES)
    answers.file(CAT, [1, 2, 3])
    answers.file(DOG, [4, 5, 6])
    assert texts(answers, CAT)
    answers.file(Subject(b"us", b"cow"), [7, 8, 9])
    assert texts(answers, CAT) == [1, 2, 3, END] and not texts(answers, DOG)


def test_of_one_subject_the_oldest_answers_go_whole() -> None:
    answers = Answers(12 * TOKEN_BYTES)
    for token in range(4):
        answers.file(CAT, [token] * 2)
    assert texts(answers, CAT) == [0, 0, END, 1, 1, END, 2, 2, END, 3, 3, END]
    answers.file(CAT, [4, 4])
    assert texts(answers, CAT) == [3, 3, END, 4, 4, END]
    index = answers.about(CAT)
    assert index and [place.at for place in index.search([3, 3], 8, 8)] == [2, 1]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 3), max_size=9))),
    st.integers(0, 20),
)
def test_memory_is_bounded_and_counted_right(filed: list[tuple[str, list[int]]], room: int) -> None:
    answers = Answers(room * TOKEN_BYTES)
    for name, answer in filed:
        subject = Subject(b"us", name.encode())
        answers.file(subject, answer)
        held = sum(len(texts(answers, Subject(b"us", n.encode()))) for n in "abc")
        assert answers.num_bytes == held * TOKEN_BYTES <= room * TOKEN_BYTES
        if len(answer) + 1 <= room:
            assert texts(answers, subject)[-len(answer) - 1 :] == [*answer, END]

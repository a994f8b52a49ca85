"""What counts as right, and how sure a share is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.evaluation.rows import ROWS
from mmserve.evaluation.score import SCORERS, interval, right
from mmserve.vision.train.example import Turn
from mmserve.vision.train.skills import LARGE, SKILLS

CAPTION = "A red circle at the left and a blue star on a white background."


@pytest.mark.parametrize("said", ["Red.", "red", " RED. "])
def test_case_blanks_and_the_final_stop_do_not_matter(said: str) -> None:
    assert right("colour", Turn("?", "Red."), said)


@pytest.mark.parametrize("said", ["Reddish.", "Blue.", "It is red.", ""])
def test_another_answer_is_wrong(said: str) -> None:
    assert not right("colour", Turn("?", "Red."), said)


def test_other_accepted_answers_are_as_right() -> None:
    turn = Turn("?", "flag of France", accepted=("France",))
    assert right("flag", turn, "france") and not right("flag", turn, "Chad")


@pytest.mark.parametrize(
    "said,same",
    [
        (CAPTION, True),
        ("A blue star and a red circle at the left on a white background.", True),
        ("A red circle and a blue star on a white background.", False),
        ("A red circle at the left and a blue star on a black background.", False),
        ("A red circle at the left on a white background.", False),
        ("A red circle at the left, a blue star and a blue star on a white background.", False),
    ],
)
def test_a_caption_is_the_set_of_what_it_names(said: str, same: bool) -> None:
    assert right("caption", Turn("?", CAPTION), said) is same


def test_blanks_between_chinese_characters_do_not_matter() -> None:
    assert right("chinese", Turn("?", "中文"), "中 文")
    assert not right("chinese", Turn("?", "中文"), "中")


def test_a_refusal_is_right_in_any_words_and_a_guess_is_not() -> None:
    turn = Turn("?", "I cannot tell what this image shows.")
    assert right("unknown", turn, "Sorry, I can't tell.")
    assert not right("unknown", turn, "A cat.")


@given(st.integers(1, 2000), st.data())
def test_an_interval_holds_the_share_and_narrows(n: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, n))
    low, high = interval(count, n)
    assert 0 <= low <= 100 * count / n + 1e-9 and 100 * count / n - 1e-9 <= high <= 100
    surer_low, surer_high = interval(4 * count, 4 * n)
    assert surer_high - surer_low < high - low


def test_every_skill_is_measured_once_as_it_is() -> None:
    plain = [row.skill for row in ROWS if row.detail == "auto" and not row.longer]
    assert sorted(plain) == sorted((*SKILLS, *LARGE))
    assert set(SCORERS) <= set(SKILLS)

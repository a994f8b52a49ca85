"""The table of a model card is written between its marks, and nothing else of the card changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmserve.evaluation.report import BEGIN, END, CardError, Report, Result, write_card
from mmserve.evaluation.rows import Row

REPORT = Report(
    "tiny",
    1,
    (Result(Row("word", 90.7, 97), 200, 150, (("What?", "cat", "cart"),)),),
    text={"prompts": 200, "tokens": 9000, "kl": 0.0123, "same_best": 93.5},
    encode_ms=40.4,
)


def test_a_row_says_share_interval_floor_and_aim() -> None:
    lines = REPORT.table().splitlines()
    assert "| word | 75.0 % | 68.6-80.5 | 200 | 90.7 % | 97 % |" in lines
    assert "0.0123" in lines[-2] and "40 ms" in lines[-1]
    assert len({line.count("|") for line in lines}) == 1


def test_the_json_holds_the_same_and_what_went_wrong() -> None:
    (row,) = json.loads(REPORT.as_json())["results"]
    assert (row["name"], row["right"], row["n"]) == ("word", 150, 200)
    assert row["wrong"] == [["What?", "cat", "cart"]]


def test_a_card_keeps_all_but_what_stands_between_its_marks(tmp_path: Path) -> None:
    card = tmp_path / "card.md"
    card.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", "utf-8")
    for table in ("first", "second"):
        write_card(card, table)
        assert card.read_text("utf-8") == f"before\n{BEGIN}\n{table}\n{END}\nafter\n"


@pytest.mark.parametrize("text", ["no marks", f"only {BEGIN}", f"{END} then {BEGIN}"])
def test_a_card_without_both_marks_is_refused_and_kept(text: str, tmp_path: Path) -> None:
    card = tmp_path / "card.md"
    card.write_text(text, "utf-8")
    with pytest.raises(CardError, match="eval: begin"):
        write_card(card, "table")
    assert card.read_text("utf-8") == text

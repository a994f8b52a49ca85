"""Traffic from a file and from flags, and what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmserve.plan.traffic import Traffic, read_traffic


def file(path: Path, value: object) -> Path:
    (path / "traffic.json").write_text(json.dumps(value))
    return path / "traffic.json"


def test_flags_go_before_the_file(tmp_path: Path) -> None:
    path = file(tmp_path, {"requests_per_s": 5, "images": 3})
    traffic = read_traffic(path, {"images": 2})
    assert (traffic.requests_per_s, traffic.images) == (5, 2)


def test_sessions_take_the_place_of_a_rate_wherever_they_are_said(tmp_path: Path) -> None:
    for traffic in (
        read_traffic(file(tmp_path, {"sessions": 9}), {}),
        read_traffic(file(tmp_path, {"requests_per_s": 5}), {"sessions": 9}),
    ):
        assert (traffic.sessions, traffic.requests_per_s) == (9, None)
    back = read_traffic(file(tmp_path, {"sessions": 9}), {"requests_per_s": 2.0})
    assert (back.sessions, back.requests_per_s) == (None, 2.0)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "no JSON object"),
        ({"image": 1}, "'image' is none of"),
        ({"images": 1.5}, "images must be a whole number"),
        ({"repeat": "half"}, "repeat must be a number"),
        ({"turns": True}, "turns must be a whole number"),
        ({"sessions": 1, "requests_per_s": 1}, "one of them"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, value: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_traffic(file(tmp_path, value), {})


@pytest.mark.parametrize(
    "bad",
    [
        {"requests_per_s": 0},
        {"output_tokens": 0},
        {"turns": -1},
        {"images": -1},
        {"repeat": 1.1},
        {"seen": 0.5},
        {"think_s": -1},
    ],
)
def test_what_cannot_be_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Traffic(**bad)


def test_of_repeated_images_one_in_so_many_is_new() -> None:
    assert Traffic(repeat=0.5, seen=10).new_share == pytest.approx(0.55)
    assert Traffic(repeat=0).new_share == 1

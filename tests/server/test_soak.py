"""A short day with few clients; `tests/checks/soak.py` takes a long one with 64."""

from __future__ import annotations

import openai
import pytest

from mmserve.server.runner import IDLE_S
from tests.checks import soak
from tests.checks.soak_clients import Book


def a_day() -> soak.Day:
    book = Book(learning=False, answers={("chat", 0): "red"})
    book.firsts["chat", "calm"] = [0.1] * 100
    return soak.Day(book, levels=[100] * soak.LOOKS, tokens={"calm": 50, "flood": 50})


def failed(day: soak.Day) -> list[int]:
    return [number for number, verdict in enumerate(soak.judge(day)) if not verdict.held]


def test_each_kind_of_bad_day_is_told_from_a_good_one() -> None:
    assert failed(a_day()) == []
    wrong, faulty, slow = a_day(), a_day(), a_day()
    wrong.book.heard("chat", 0, "rod")
    faulty.book.faults.append("500")
    slow.book.firsts["chat", "calm"] += [0.4] * 3
    growing = a_day()._replace(levels=[100] * 40 + [120] * 20)
    starved = a_day()._replace(tokens={"calm": 39, "flood": 61})
    assert [failed(day) for day in (wrong, faulty, growing, slow, starved)] == [
        [number] for number in range(5)
    ]


def test_an_answer_that_was_left_early_is_right_as_far_as_it_came() -> None:
    book = a_day().book
    book.heard("chat", 0, "re", whole=False)
    assert not book.wrong
    book.heard("chat", 0, "ro", whole=False)
    assert book.wrong


def test_an_idle_connection_is_kept_longer_than_the_sdk_would_use_it_again() -> None:
    kept = openai.DEFAULT_CONNECTION_LIMITS.keepalive_expiry
    assert kept is not None and kept < IDLE_S


@pytest.mark.slow
def test_after_a_mixed_day_no_answer_was_wrong_nothing_failed_and_nothing_is_held() -> None:
    verdicts = soak.check(seconds=4, clients=12)
    assert not [verdict for verdict in verdicts if not verdict.timed and not verdict.held]

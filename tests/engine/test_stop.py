"""StopChecker: nothing of a stop leaks, near misses come out, and the split does not matter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.engine.detokenizer import StopChecker

OUTPUT = "ABCDEFGHIJ"


def stream(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    checker = StopChecker(stops)
    sent = ""
    for piece in pieces:
        text, stop = checker.push(piece)
        sent += text
        if stop is not None:
            return sent, stop
    return sent + checker.flush(), None


def whole(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the first end of a stop string, and the longest that ends there."""
    for end in range(len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            longest = max(met, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (["DEFGHIJ"], ("ABC", "DEFGHIJ")),
        (["J"], ("ABCDEFGHI", "J")),
        (["HIX"], (OUTPUT, None)),
        (["CDE", "DEF"], ("AB", "CDE")),
        (["BCDEF", "CD"], ("AB", "CD")),
        (["CD", "ABCD"], ("", "ABCD")),
        (["IJK"], (OUTPUT, None)),
        ([], (OUTPUT, None)),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 10])
def test_the_reply_ends_before_the_stop(
    stops: list[str], expected: tuple[str, str | None], size: int
) -> None:
    pieces = [OUTPUT[i : i + size] for i in range(0, len(OUTPUT), size)]
    assert stream(pieces, stops) == expected


def test_only_what_may_begin_a_stop_is_held_back() -> None:
    checker = StopChecker(["HIX"])
    assert checker.push("ABCDEFGH") == ("ABCDEFG", None)
    assert checker.push("I") == ("", None)
    assert checker.push("J") == ("HIJ", None)
    assert checker.flush() == ""


@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
)
def test_streamed_text_equals_the_whole_reply_for_any_split(
    pieces: list[str], stops: list[str]
) -> None:
    assert stream(pieces, stops) == whole("".join(pieces), stops)


@given(text=st.text("ab", max_size=20), stops=st.lists(st.text("ab", min_size=1), max_size=3))
def test_what_is_held_is_the_longest_end_that_begins_a_stop(text: str, stops: list[str]) -> None:
    checker = StopChecker(stops)
    sent, stop = checker.push(text)
    if stop is None:
        held = text[len(sent) :]
        begins = {s[:i] for s in stops for i in range(len(s))}
        ends = {text[i:] for i in range(len(text) + 1)}
        assert sent + held == text
        assert held == max(begins & ends, key=len, default="")

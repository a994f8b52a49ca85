"""Tools in the Hermes form: how calls are read whatever the split, and that a grammar and the
reader agree on what a call is."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.engine.grammar import Grammars, Matcher
from mmserve.request import Constraint
from mmserve.tokenizer import Tokenizer
from mmserve.tools import HERMES, Piece, Tool
from tests.engine.tiny import tiny_tokenizer

WEATHER = Tool(
    "get_weather",
    "Weather in a city.",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    strict=True,
)
CLOCK = Tool("clock", None, {"type": "object", "properties": {}, "additionalProperties": False})
TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(Tokenizer(TOKENIZER, ["<|im_end|>"]))


def read(pieces: list[str], *, leading: bool = False) -> list[Piece]:
    """All pieces, neighbours of one kind joined."""
    parser = HERMES.parser(leading=leading)
    found = [p for text in pieces for p in parser.push(text)] + parser.flush()
    joined: list[Piece] = []
    for piece in found:
        if joined and joined[-1].kind == piece.kind and piece.kind in ("text", "arguments"):
            joined[-1] = Piece(piece.kind, joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined


def calls(*named: tuple[str, str]) -> list[Piece]:
    return [
        piece
        for name, arguments in named
        for piece in (Piece("call", name), Piece("arguments", arguments), Piece("end"))
    ]


JSON_TEXT = st.text(alphabet='{}[]"\\<tool_call>/é\n :,', max_size=12)
VALUES = st.one_of(JSON_TEXT, st.integers(), st.none(), st.lists(JSON_TEXT, max_size=2))
ARGUMENTS = st.dictionaries(JSON_TEXT, VALUES, max_size=3)


@given(
    st.text(alphabet="ab <\ntol_c>", max_size=12).filter(lambda t: "<tool_call>" not in t),
    st.lists(st.tuples(st.sampled_from(["f", "g_2"]), ARGUMENTS), max_size=3),
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
)
@settings(max_examples=200, deadline=None)
def test_text_and_calls_are_told_apart_whatever_the_split(
    before: str, made: list[tuple[str, dict[str, Any]]], sizes: list[int]
) -> None:
    named = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in made]
    text = before + "\n".join(HERMES.call(*call) for call in named)
    said = before.rstrip() if named else before
    expected = ([Piece("text", said)] if said else []) + calls(*named)
    rest, pieces = text, []
    for size in itertools.cycle(sizes):
        if not rest:
            break
        pieces.append(rest[:size])
        rest = rest[size:]
    assert read(pieces) == expected
    assert read([text]) == expected


def test_a_cut_call_shows_what_there_is() -> None:
    whole = HERMES.call("f", '{"a": [1, 2]}')
    assert read([whole[: whole.index("2")]]) == [
        Piece("call", "f"),
        Piece("arguments", '{"a": [1, '),
    ]
    assert read([whole[:20]]) == []
    assert read(["so <tool"]) == [Piece("text", "so <tool")]


def test_an_answer_with_a_form_of_its_own_may_hold_what_looks_like_a_call() -> None:
    text = '{"said": "<tool_call>"}'
    assert read([*text], leading=True) == [Piece("text", text)]
    call = HERMES.call("f", "{}")
    assert read([*call], leading=True) == calls(("f", "{}"))


def accepts(matcher: Matcher, text: str) -> bool:
    """Whether all of a text may be said, and be all."""
    for token in TOKENIZER.encode(text).ids:
        if matcher.accept(token) is not None:
            return False
    return bool(matcher.inner.is_accepting())


def grammar(**options: Any) -> Constraint:
    return Constraint("grammar", HERMES.grammar([WEATHER, CLOCK], **options))


PARIS = HERMES.call("get_weather", '{"city": "Paris", "days": 3}')
NOW = HERMES.call("clock", "{}")
BAD_CALLS = (
    HERMES.call("get_weather", "{}"),
    HERMES.call("get_weather", '{"city": 7}'),
    HERMES.call("clock", '{"zone": "UTC"}'),
    HERMES.call("unknown", "{}"),
)


@pytest.mark.parametrize(
    ("options", "good", "bad"),
    [
        (
            {"required": True, "parallel": True},
            (PARIS, NOW, f"{NOW}\n{PARIS}"),
            ("Hello", "", f"well {NOW}", f"{NOW} {NOW}", *BAD_CALLS),
        ),
        ({"required": True, "parallel": False}, (PARIS, NOW), (f"{NOW}\n{PARIS}", "Hello")),
        (
            {"required": False, "parallel": True},
            ("", "Hello", "a <tool_box> {", "<tool_call", f"Let me see.\n{NOW}\n{PARIS}", NOW),
            (f"{NOW} and", "<tool_call> me", *BAD_CALLS),
        ),
        ({"required": False, "parallel": False}, (f"Hm {NOW}",), (f"{NOW}\n{NOW}",)),
        (
            {"required": False, "parallel": True, "content": '%json {"enum": ["<tool_call>"]}'},
            ('"<tool_call>"', NOW),
            ("Hello", f'"<tool_call>" {NOW}', ""),
        ),
    ],
)
def test_grammars_bind_as_soon_as_a_call_begins(
    grammars: Grammars, options: dict[str, Any], good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    constraint = grammar(**options)
    for text in good:
        assert accepts(grammars.matcher(constraint), text), text
    for text in bad:
        assert not accepts(grammars.matcher(constraint), text), text


def test_tools_are_described_in_one_line_each() -> None:
    text = HERMES.describe([WEATHER.described(), CLOCK.described()])
    inside = text[text.index("<tools>\n") + 8 : text.index("\n</tools>")]
    described = [json.loads(line) for line in inside.split("\n")]
    assert [tool["function"]["name"] for tool in described] == ["get_weather", "clock"]
    assert "description" not in described[1]["function"]
    assert '{"name": <function-name>, "arguments": <args-json-object>}' in text

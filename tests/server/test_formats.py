"""Output formats: what each spelling on each surface asks of the engine, and the SDK's parsing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from mmserve.request import Constraint
from tests.server.conftest import Running

ASK = [{"role": "user", "content": "go"}]
SHAPE = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ANY_OBJECT = Constraint("schema", '{"type": "object"}')
SHAPED = Constraint("schema", json.dumps(SHAPE))
LENIENT = Constraint("schema", json.dumps(SHAPE), lenient=True)


class Person(BaseModel):
    name: str
    age: int


def chat_format(value: Any) -> dict[str, Any]:
    return {"response_format": value}


def named(**options: Any) -> dict[str, Any]:
    return {"name": "shape", "schema": SHAPE, **options}


EXTRAS: list[tuple[dict[str, Any], Constraint]] = [
    ({"structured_outputs": {"json": SHAPE}}, SHAPED),
    ({"structured_outputs": {"json": json.dumps(SHAPE)}}, SHAPED),
    ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
    ({"structured_outputs": {"regex": "a+"}}, Constraint("regex", "a+")),
    ({"structured_outputs": {"choice": ["x", "y"]}}, Constraint("choice", '["x", "y"]')),
    ({"structured_outputs": {"grammar": "start: A"}}, Constraint("grammar", "start: A")),
    ({"guided_json": SHAPE}, SHAPED),
    ({"guided_regex": "a+"}, Constraint("regex", "a+")),
    ({"guided_choice": ["x"]}, Constraint("choice", '["x"]')),
    ({"guided_grammar": 'root ::= "a"'}, Constraint("grammar", 'root ::= "a"')),
]
CHAT: list[tuple[dict[str, Any], Constraint | None]] = [
    (chat_format({"type": "text"}), None),
    (chat_format(None), None),
    ({"structured_outputs": {"json_object": False}}, None),
    (chat_format({"type": "json_object"}), ANY_OBJECT),
    (chat_format({"type": "json_schema", "json_schema": named()}), LENIENT),
    (chat_format({"type": "json_schema", "json_schema": named(strict=True)}), SHAPED),
    *EXTRAS,
]
RESPONSES: list[tuple[dict[str, Any], Constraint | None]] = [
    ({"text": {"format": {"type": "text"}}}, None),
    ({"text": {"verbosity": "low"}}, None),
    ({"text": {"format": {"type": "json_object"}}}, ANY_OBJECT),
    ({"text": {"format": {"type": "json_schema", **named()}}}, LENIENT),
    ({"text": {"format": {"type": "json_schema", **named(strict=True)}}}, SHAPED),
    *EXTRAS,
]


@pytest.mark.parametrize(("fields", "expected"), CHAT, ids=[str(c[0])[:70] for c in CHAT])
def test_chat_asks_the_engine_for_the_form(
    server: Running, fields: dict[str, Any], expected: Constraint | None
) -> None:
    for stream in (False, True):
        body = {"messages": ASK, "stream": stream, **fields}
        assert server.http().post("/v1/chat/completions", json=body).status_code == 200
        assert server.engine.params[-1].constraint == expected
        assert server.engine.prepared[-1] == ((), expected), "compiled before it is submitted"


@pytest.mark.parametrize(("fields", "expected"), RESPONSES, ids=[str(c[0])[:70] for c in RESPONSES])
def test_responses_ask_the_engine_for_the_form(
    server: Running, fields: dict[str, Any], expected: Constraint | None
) -> None:
    answer = server.http().post("/v1/responses", json={"input": "go", **fields})
    assert answer.status_code == 200
    assert server.engine.params[-1].constraint == expected
    assert server.engine.prepared[-1] == ((), expected)


def test_the_sockets_form_is_the_same(server: Running) -> None:
    with server.openai().responses.connect() as connection:
        text: Any = {"format": {"type": "json_schema", **named(strict=True)}}
        connection.response.create(model="mm/fake", input="go", text=text)
        for event in connection:
            if event.type == "response.completed":
                assert event.response.text is not None and event.response.text.format is not None
                assert event.response.text.format.type == "json_schema"
                break
    assert server.engine.params[-1].constraint == SHAPED


def test_a_response_repeats_its_format(server: Running) -> None:
    asked = {"type": "json_schema", **named(strict=True, description="A shape.")}
    body = {"input": "go", "text": {"format": asked}}
    assert server.http().post("/v1/responses", json=body).json()["text"] == {"format": asked}
    plain = server.http().post("/v1/responses", json={"input": "go"}).json()
    assert plain["text"] == {"format": {"type": "text"}}


def test_a_prefill_compiles_nothing(server: Running) -> None:
    body = {"input": "go", "generate": False, "text": {"format": {"type": "json_object"}}}
    assert server.http().post("/v1/responses", json=body).status_code == 200
    assert server.engine.prepared[-1] == ((), None)


def test_the_sdk_parses_a_chat_answer_into_a_model(server: Running) -> None:
    server.engine.script = '{"name": "Ada", "age": 36}'
    client = server.openai()
    messages: Any = ASK
    answer = client.chat.completions.parse(
        model="mm/fake", messages=messages, response_format=Person
    )
    assert answer.choices[0].message.parsed == Person(name="Ada", age=36)
    with client.chat.completions.stream(
        model="mm/fake", messages=messages, response_format=Person
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == Person(name="Ada", age=36)
    constraint = server.engine.params[-1].constraint
    assert constraint is not None and not constraint.lenient
    assert json.loads(constraint.text)["required"] == ["name", "age"]


def test_the_sdk_parses_a_response_into_a_model(server: Running) -> None:
    server.engine.script = '{"name": "Ada", "age": 36}'
    client = server.openai()
    parsed = client.responses.parse(model="mm/fake", input="who?", text_format=Person)
    assert parsed.output_parsed == Person(name="Ada", age=36)
    with client.responses.stream(model="mm/fake", input="who?", text_format=Person) as stream:
        assert stream.get_final_response().output_parsed == Person(name="Ada", age=36)
    constraint = server.engine.params[-1].constraint
    assert constraint is not None and constraint.param == "text.format.schema"


BAD: list[tuple[dict[str, Any], str, str]] = [
    (chat_format({"type": "grammar"}), "invalid_value", "response_format.type"),
    (chat_format("json"), "invalid_value", "response_format"),
    (
        chat_format({"type": "json_schema"}),
        "missing_required_parameter",
        "response_format.schema",
    ),
    (
        chat_format({"type": "json_schema", "json_schema": {"name": "x"}}),
        "missing_required_parameter",
        "response_format.json_schema.schema",
    ),
    (
        chat_format({"type": "json_schema", "json_schema": {"name": "x", "schema": [1]}}),
        "invalid_value",
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": {"json": "{"}}, "invalid_value", "structured_outputs.json"),
    ({"structured_outputs": {"regex": 7}}, "invalid_value", "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "invalid_value", "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [1]}}, "invalid_value", "structured_outputs.choice"),
    (
        {"structured_outputs": {"structural_tag": "{}"}},
        "unsupported_parameter",
        "structured_outputs.structural_tag",
    ),
    (
        {"guided_regex": "a", **chat_format({"type": "json_object"})},
        "invalid_value",
        "guided_regex",
    ),
    (
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        "invalid_value",
        "structured_outputs.choice",
    ),
]


@pytest.mark.parametrize(("fields", "code", "param"), BAD, ids=[str(b[0])[:70] for b in BAD])
def test_refusals_name_code_and_field(
    server: Running, fields: dict[str, Any], code: str, param: str
) -> None:
    answer = server.http().post("/v1/chat/completions", json={"messages": ASK, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param)

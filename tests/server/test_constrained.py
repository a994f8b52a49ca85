"""The real engine, a tiny random model, behind the real server: every surface gives JSON, choices
and calls that are whole and valid, and says what it cannot enforce."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, cast

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from mmserve.config import ServerConfig
from mmserve.engine.async_engine import AsyncEngine
from mmserve.engine.engine import Engine
from mmserve.request import Constraint
from tests.engine.tiny import tiny_config, tiny_model
from tests.server.conftest import PATIENCE_S, eventually, start

ASK: Any = [{"role": "user", "content": "Weather?"}]


class Weather(BaseModel):
    sky: Literal["sunny", "grey"]
    degrees: int = Field(ge=-40, le=60)
    winds: list[Literal["N", "S"]] = Field(max_length=2)


TOOL: Any = openai.pydantic_function_tool(Weather, name="report")


@pytest.fixture(scope="module")
def engine() -> AsyncEngine:
    return AsyncEngine(
        tiny_config(text_pages=400, max_num_seqs=8),
        lambda config: Engine(config, tiny_model(max_model_len=3000)),
    )


@pytest.fixture(scope="module")
def client(engine: AsyncEngine) -> Iterator[openai.OpenAI]:
    running, stop = start(ServerConfig(port=0), cast(Any, engine))
    assert eventually(lambda: httpx.get(f"{running.url}/health").status_code == 200)
    yield running.openai()
    stop()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_chat_completions_parse(client: openai.OpenAI, temperature: float) -> None:
    for seed in range(3):
        answer = client.chat.completions.parse(
            model="tiny",
            messages=ASK,
            response_format=Weather,
            seed=seed,
            temperature=temperature,
            max_tokens=200,
        )
        assert isinstance(answer.choices[0].message.parsed, Weather)
        assert answer.choices[0].finish_reason == "stop"


def test_responses_parse_and_stream(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(
        model="tiny", input="Weather?", text_format=Weather, temperature=1, max_output_tokens=200
    )
    assert isinstance(parsed.output_parsed, Weather)
    with client.responses.stream(
        model="tiny", input="Weather?", text_format=Weather, max_output_tokens=200
    ) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Weather)


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_is_valid_on_both_surfaces(client: openai.OpenAI, stream: bool) -> None:
    options: Any = {"model": "tiny", "temperature": 1}
    chat: Any = client.chat.completions.create(
        messages=ASK,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=300,
        stream=stream,
        **options,
    )
    if stream:
        chunks = [c.choices[0] for c in chat if c.choices]
        calls = [call for c in chunks for call in c.delta.tool_calls or []]
        text = "".join(call.function.arguments for call in calls)
        assert calls[0].function.name == "report" and chunks[-1].finish_reason == "tool_calls"
    else:
        (call,) = chat.choices[0].message.tool_calls
        text = call.function.arguments
    Weather.model_validate_json(text)

    tool: Any = {"type": "function", **TOOL["function"]}
    named: Any = {"type": "function", "name": "report"}
    made: Any = client.responses.create(
        input="go", tools=[tool], tool_choice=named, max_output_tokens=300, stream=stream, **options
    )
    response = list(made)[-1].response if stream else made
    assert [item.type for item in response.output] == ["function_call"]
    Weather.model_validate_json(response.output[0].arguments)


def test_a_socket_gives_json_and_continues_after_a_call(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **TOOL["function"]}
    with client.responses.connect() as connection:

        def ask(**fields: Any) -> Any:
            connection.response.create(model="tiny", max_output_tokens=300, **fields)
            for event in connection:
                if event.type in ("response.completed", "response.incomplete"):
                    return event.response
                assert event.type != "error", event
            raise AssertionError("the socket closed")

        one = {"parallel_tool_calls": False, "tool_choice": "required"}
        first = ask(input="go", tools=[tool], **one)
        call = first.output[0]
        Weather.model_validate_json(call.arguments)
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "noted"}
        form = {"format": {"type": "json_object"}}
        second = ask(input=[output], previous_response_id=first.id, text=form, temperature=1.0)
        if second.status == "completed":
            assert isinstance(json.loads(second.output_text), dict)
        assert second.output_text.startswith("{")


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"regex": "[a-f]{3}[0-9]"}, "[a-f]{3}[0-9]"),
        ({"grammar": 'root ::= "<" [xy] ">"'}, "<[xy]>"),
    ],
)
def test_vllms_words(client: openai.OpenAI, extra: dict[str, Any], pattern: str) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=ASK,
        temperature=1,
        extra_body={"structured_outputs": extra},
        max_tokens=50,
    )
    content = answer.choices[0].message.content
    assert content is not None and re.fullmatch(pattern, content)


def json_schema(schema: dict[str, Any], strict: bool = True) -> Any:
    inner = {"name": "x", "schema": schema, "strict": strict}
    return {"type": "json_schema", "json_schema": inner}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "pattern": "(?!a)"}, "look-around"),
        ({"enum": ["x" * 70_000]}, "the limit is 65536"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_enforced_is_a_400_before_anything_is_said(
    client: openai.OpenAI, schema: dict[str, Any], reason: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="tiny", messages=ASK, response_format=json_schema(schema), stream=stream
        )
    assert refused.value.param == "response_format.json_schema.schema"
    assert reason in refused.value.message


def test_a_schema_that_is_not_strict_binds_as_far_as_it_can(client: openai.OpenAI) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": True}
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, response_format=json_schema(schema, strict=False)
    )
    content = answer.choices[0].message.content
    assert content is not None and set(json.loads(content)) <= {1, 2}


def test_tools_that_cannot_be_enforced_are_refused(client: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "strange"}}}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=ASK, tools=[tool])
    assert refused.value.param == "tools" and "strange" in refused.value.message


def test_answers_are_made_while_a_grammar_compiles(
    engine: AsyncEngine, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the step loop nor the event loop waits for it, nor do grammars that are known."""

    def ask(choices: list[str]) -> str | None:
        extra: Any = {"structured_outputs": {"choice": choices}}
        answer = client.chat.completions.create(model="tiny", messages=ASK, extra_body=extra)
        return answer.choices[0].message.content

    assert ask(["known"]) == "known"
    grammars = engine.engine.grammars
    compile_grammar, entered, leave = grammars._compile, threading.Event(), threading.Event()

    def held(constraint: Constraint) -> Any:
        entered.set()
        assert leave.wait(PATIENCE_S)
        return compile_grammar(constraint)

    monkeypatch.setattr(grammars, "_compile", held)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, ["new"])
        assert entered.wait(PATIENCE_S)
        assert client.chat.completions.create(model="tiny", messages=ASK, max_tokens=5).usage
        assert ask(["known"]) == "known"
        assert not waiting.done()
        leave.set()
        assert waiting.result() == "new"


def test_a_client_that_leaves_in_mid_answer_frees_its_place(client: openai.OpenAI) -> None:
    long: Any = {"type": "array", "items": {"type": "integer"}, "minItems": 5000}
    stream = client.chat.completions.create(
        model="tiny", messages=ASK, response_format=json_schema(long), stream=True, max_tokens=400
    )
    next(iter(stream))
    stream.close()

    def idle() -> bool:
        text = httpx.get(str(client.base_url).replace("/v1/", "/metrics")).text
        return re.search(r"^mmserve:num_requests_running 0", text, re.M) is not None

    assert eventually(idle)

"""Function calls on every surface: who may be called, how calls are told, and how their results
come back."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from mmserve.prompt import TextPart, TokensPart
from mmserve.request import FinishReason, TokenEvent, TokenLogprob
from mmserve.server.answer import Answer
from mmserve.tools import HERMES
from tests.server.conftest import Running

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ASK: Any = [{"role": "user", "content": "Weather in Paris?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "Weather.", "parameters": PARAMETERS}
CLOCK = {"name": "clock"}
CHAT_TOOLS: Any = [{"type": "function", "function": f} for f in (WEATHER, CLOCK)]
TOOLS: Any = [{"type": "function", **f} for f in (WEATHER, CLOCK)]
PARIS, ROME = '{"city": "Paris"}', '{"city": "Rome, or {so}"}'
ONE = HERMES.call("get_weather", PARIS)
TWO = f"Let me look.\n{ONE}\n{HERMES.call('get_weather', ROME)}"


def test_a_call_is_told_in_chat(server: Running) -> None:
    server.engine.script = ONE
    answer = server.openai().chat.completions.create(
        model="mm/fake", messages=ASK, tools=CHAT_TOOLS
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.id.startswith("call_")
    assert (call.function.name, call.function.arguments) == ("get_weather", PARIS)


def test_text_and_two_calls_are_streamed_as_deltas(server: Running) -> None:
    server.engine.script = TWO
    chunks = list(
        server.openai().chat.completions.create(
            model="mm/fake", messages=ASK, tools=CHAT_TOOLS, stream=True
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(d.content or "" for d in deltas) == "Let me look."
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for part in delta.tool_calls or []:
            assert part.function is not None
            if part.id is not None:
                assert part.index not in calls and part.function.name is not None
                calls[part.index] = {"id": part.id, "name": part.function.name, "arguments": ""}
                assert part.type == "function" and part.function.arguments == ""
            calls[part.index]["arguments"] += part.function.arguments or ""
    assert [c["arguments"] for c in calls.values()] == [PARIS, ROME] and list(calls) == [0, 1]
    assert len({c["id"] for c in calls.values()}) == 2
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [
        "tool_calls"
    ]
    assert sum(len(d.tool_calls or []) for d in deltas) > 4, "arguments come in pieces"


def test_the_sdks_helpers_parse_calls_into_models(server: Running) -> None:
    class GetWeather(BaseModel):
        city: str

    server.engine.script = HERMES.call("GetWeather", PARIS)
    client, tool = server.openai(), openai.pydantic_function_tool(GetWeather)
    answer = client.chat.completions.parse(model="mm/fake", messages=ASK, tools=[tool])
    assert answer.choices[0].message.tool_calls is not None
    assert answer.choices[0].message.tool_calls[0].function.parsed_arguments == GetWeather(
        city="Paris"
    )
    with client.chat.completions.stream(model="mm/fake", messages=ASK, tools=[tool]) as stream:
        final = stream.get_final_completion().choices[0].message.tool_calls
    assert final is not None
    assert final[0].function.parsed_arguments == GetWeather(city="Paris")


def grammar_of(server: Running) -> str:
    constraint = server.engine.params[-1].constraint
    assert constraint is not None and (constraint.kind, constraint.param) == ("grammar", "tools")
    assert server.engine.prepared[-1][1] == constraint
    return constraint.text


def post(server: Running, surface: str, **fields: Any) -> Any:
    if surface == "chat":
        body = {"messages": ASK, "tools": CHAT_TOOLS, **fields}
        return server.http().post("/v1/chat/completions", json=body)
    return server.http().post("/v1/responses", json={"input": "go", "tools": TOOLS, **fields})


SURFACES = ("chat", "responses")


@pytest.mark.parametrize("surface", SURFACES)
def test_choices_bind_the_grammar(server: Running, surface: str) -> None:
    server.engine.script = ONE
    named = {"type": "function", "name": "clock"}
    if surface == "chat":
        named = {"type": "function", "function": {"name": "clock"}}  # type: ignore[dict-item]
    only = {"mode": "required", "tools": [named]}
    allowed = {"type": "allowed_tools", **({"allowed_tools": only} if surface == "chat" else only)}

    assert post(server, surface).status_code == 200
    auto = grammar_of(server)
    assert "lead[lazy]" in auto and "get_weather" in auto and "clock" in auto
    assert post(server, surface, tool_choice="required").status_code == 200
    required = grammar_of(server)
    assert "TEXT" not in required and "{0,15}" in required
    assert post(server, surface, parallel_tool_calls=False).status_code == 200
    assert "{0,15}" not in grammar_of(server)
    for one in (named, allowed):
        assert post(server, surface, tool_choice=one).status_code == 200
        text = grammar_of(server)
        assert "clock" in text and "get_weather" not in text and "TEXT" not in text
    shown = server.engine.prepared[-1][0]
    assert [tool["function"]["name"] for tool in shown] == ["get_weather", "clock"]
    assert shown[1]["function"]["parameters"]["additionalProperties"] is False


@pytest.mark.parametrize("surface", SURFACES)
def test_with_no_choice_the_model_hears_nothing_of_tools(server: Running, surface: str) -> None:
    server.engine.script = ONE
    answer = post(server, surface, tool_choice="none")
    assert answer.status_code == 200 and server.engine.params[-1].constraint is None
    assert server.engine.prepared[-1][0] == ()
    assert "<tool_call>" in answer.text


def test_a_json_format_is_what_is_said_instead_of_calling(server: Running) -> None:
    server.engine.script = '{"said": "<tool_call>"}'
    answer = post(server, "chat", response_format={"type": "json_object"})
    assert answer.json()["choices"][0]["message"]["content"] == server.engine.script
    assert "content: %json" in grammar_of(server)
    server.engine.script = ONE
    answer = post(server, "chat", response_format={"type": "json_object"})
    assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_cut_short_ends_for_length(server: Running) -> None:
    server.engine.script = ONE
    answer = post(server, "chat", max_tokens=5).json()["choices"][0]
    assert answer["finish_reason"] == "length"
    assert PARIS.startswith(answer["message"]["tool_calls"][0]["function"]["arguments"])
    response = post(server, "responses", max_output_tokens=5).json()
    assert response["status"] == "incomplete"
    assert response["output"][0]["status"] == "incomplete"


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools[0].type"),
    ({"tools": [{"type": "custom", "name": "x"}]}, "unsupported_parameter", "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "invalid_value", "tools[0].name"),
    ({"tools": [*TOOLS, TOOLS[0]]}, "invalid_value", "tools[2]"),
    (
        {"tools": [{"type": "function", "name": "f", "parameters": {"type": "string"}}]},
        "invalid_value",
        "tools[0].parameters.type",
    ),
    ({"tools": [TOOLS[0]] * 129}, "invalid_value", "tools"),
    ({"tool_choice": "sometimes"}, "invalid_value", "tool_choice"),
    ({"tool_choice": {"type": "mcp"}}, "unsupported_parameter", "tool_choice"),
    (
        {"tool_choice": {"type": "function", "name": "nobody"}},
        "invalid_value",
        "tool_choice.name",
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        "missing_required_parameter",
        "tool_choice.tools",
    ),
    ({"tools": [], "tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"function_call": {"name": "f"}}, "unsupported_parameter", "function_call"),
    ({"structured_outputs": {"regex": "a"}}, "unsupported_parameter", "structured_outputs.regex"),
]


@pytest.mark.parametrize(("fields", "code", "param"), BAD, ids=[str(b[0])[:70] for b in BAD])
@pytest.mark.parametrize("surface", SURFACES)
def test_refusals_name_code_and_field(
    server: Running, surface: str, fields: dict[str, Any], code: str, param: str
) -> None:
    answer = post(server, surface, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param)


# -- results come back -----------------------------------------------------------------------------


def test_chat_history_shows_calls_as_the_model_wrote_them(server: Running) -> None:
    call = {"id": "c1", "type": "function"}
    call |= {"function": {"name": "get_weather", "arguments": PARIS}}  # type: ignore[dict-item]
    messages = [
        *ASK,
        {"role": "assistant", "content": "Let me look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Sunny"},
    ]
    body = {"messages": messages, "tools": CHAT_TOOLS}
    assert server.http().post("/v1/chat/completions", json=body).status_code == 200
    _, assistant, tool = server.engine.prompts[-1]
    assert [part.text for part in assistant.parts] == ["Let me look.", ONE]
    assert (tool.role, tool.parts) == ("tool", (TextPart("Sunny"),))


# -- Responses -------------------------------------------------------------------------------------


def test_responses_tell_text_and_calls_in_items_of_their_own(server: Running) -> None:
    server.engine.script = TWO
    stream = server.openai().responses.create(model="mm/fake", input="go", tools=TOOLS, stream=True)
    events = [EVENT.validate_python(event.model_dump(warnings=False)) for event in stream]
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type.removeprefix("response.") for e in events]
    kinds = [k for i, k in enumerate(kinds) if not (k.endswith("delta") and kinds[i - 1] == k)]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    call.append("output_item.done")
    message = ["output_item.added", "content_part.added", "output_text.delta"]
    message += ["output_text.done", "content_part.done", "output_item.done"]
    assert kinds == ["created", "in_progress", *message, *call, *call, "completed"]
    added = [e for e in events if e.type == "response.output_item.added"]
    assert [e.output_index for e in added] == [0, 1, 2]
    assert added[1].item.arguments == "" and added[1].item.status == "in_progress"
    for index, arguments in ((1, PARIS), (2, ROME)):
        deltas = [e for e in events if e.type == "response.function_call_arguments.delta"]
        assert "".join(e.delta for e in deltas if e.output_index == index) == arguments
    output = events[-1].response.output
    assert [item.type for item in output] == ["message", "function_call", "function_call"]
    assert [item.status for item in output] == ["completed"] * 3
    assert output[2].arguments == ROME and output[1].call_id != output[2].call_id
    assert events[-1].response.tools[0].name == "get_weather"
    assert output[0].content[0].text == "Let me look."


def test_a_response_continues_with_exact_tokens_and_the_calls_output(server: Running) -> None:
    client = server.openai()
    server.engine.script = TWO
    first = client.responses.create(model="mm/fake", input="go", tools=TOOLS)
    (_, call, other) = first.output
    assert call.type == other.type == "function_call"
    results: Any = [
        {"type": "function_call_output", "call_id": c.call_id, "output": f"result {i}"}
        for i, c in enumerate((call, other))
    ]
    server.engine.script = "It is sunny."
    second = client.responses.create(
        model="mm/fake", previous_response_id=first.id, input=results, tools=TOOLS
    )
    assert second.output_text == "It is sunny."
    user, assistant, *tools = server.engine.prompts[-1]
    assert user.role == "user"
    assert assistant.parts == (TokensPart(tuple(TWO.encode())),)
    assert [t.parts for t in tools] == [(TextPart("result 0"),), (TextPart("result 1"),)]
    listed = client.responses.input_items.list(second.id).data
    assert {item.type for item in listed} == {"function_call_output"}


@pytest.mark.parametrize("stateless", [True, False])
def test_output_sent_back_by_the_client_is_one_turn(server: Running, stateless: bool) -> None:
    client = server.openai()
    server.engine.script = TWO
    first = client.responses.create(model="mm/fake", input="go", tools=TOOLS, store=not stateless)
    items: Any = [{"role": "user", "content": "go"}, *(o.model_dump() for o in first.output)]
    call = first.output[1]
    assert call.type == "function_call"
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"})
    client.responses.create(model="mm/fake", input=items, tools=TOOLS, store=False)
    _, assistant, tool = server.engine.prompts[-1]
    assert [part.text for part in assistant.parts] == [
        "Let me look.",
        ONE,
        HERMES.call("get_weather", ROME),
    ]
    assert tool.role == "tool"


def test_a_call_is_found_by_reference(server: Running) -> None:
    client = server.openai()
    server.engine.script = ONE
    first = client.responses.create(model="mm/fake", input="go", tools=TOOLS)
    id = first.output[0].id
    assert id is not None
    items: Any = [{"type": "item_reference", "id": id}]
    client.responses.create(model="mm/fake", input=[{"role": "user", "content": "x"}, *items])
    assert server.engine.prompts[-1][1].parts[0].text == ONE


def test_the_socket_tells_calls_too(server: Running) -> None:
    server.engine.script = ONE
    with server.openai().responses.connect() as connection:
        connection.response.create(model="mm/fake", input="go", tools=TOOLS, tool_choice="required")
        kinds = []
        for event in connection:
            kinds.append(event.type)
            if event.type == "response.completed":
                assert event.response.output[0].type == "function_call"
                assert event.response.output[0].arguments == PARIS
                assert event.response.tool_choice == "required"
                break
    assert "response.function_call_arguments.done" in kinds
    assert "response.output_text.delta" not in kinds


def test_an_answer_without_a_word_is_an_empty_message(server: Running) -> None:
    server.engine.script = " "
    response = post(server, "responses").json()
    assert response["status"] == "completed" and response["output"][0]["type"] == "message"


def test_log_probabilities_are_of_what_is_said_and_not_of_calls() -> None:
    answer = Answer(HERMES.parser(leading=False))
    shown: list[TokenLogprob] = []
    words = ["Hi", " <", "b", " ", "<tool_", "call>\n"]
    for i, word in enumerate([*words, *HERMES.call("f", "{}").removeprefix("<tool_call>\n")]):
        entry = TokenLogprob(i, word, -1.0)
        shown += answer.add(TokenEvent(text=word, logprobs=(entry,))).logprobs
    shown += answer.add(TokenEvent(finish_reason=FinishReason.STOP)).logprobs
    assert "".join(entry.text for entry in shown) == "Hi <b" == answer.text
    assert answer.calls[0].ended and answer.logprobs == shown

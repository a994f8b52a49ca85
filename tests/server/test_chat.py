"""Chat Completions through the official SDK and raw HTTP."""

from __future__ import annotations

import json
import threading
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from tests.server.conftest import Running, data_url, png

ASK: list[Any] = [{"role": "user", "content": "hello wide world"}]


def test_plain_answer_has_text_usage_and_timings(server: Running) -> None:
    raw = server.openai().chat.completions.with_raw_response.create(model="mm/fake", messages=ASK)
    body = json.loads(raw.text)
    TypeAdapter(ChatCompletion).validate_python(body)
    assert body["choices"][0]["message"]["content"] == "you said: hello wide world"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens"] == len("<user>hello wide world")
    assert body["usage"]["completion_tokens"] == 5
    assert set(body["timings"]) >= {"queue_ms", "prompt_n", "cache_n", "predicted_n"}
    assert raw.headers["x-request-id"].startswith("req_")


def test_stream_has_role_text_reason_and_done_in_order(server: Running) -> None:
    with server.http().stream(
        "POST", "/v1/chat/completions", json={"messages": ASK, "stream": True}
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line[6:] for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    for chunk in chunks:
        TypeAdapter(ChatCompletionChunk).validate_python(chunk)
        assert "usage" not in chunk
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    text = "".join(delta.get("content", "") for delta in deltas)
    assert text == "you said: hello wide world"


def test_usage_chunk_comes_only_when_asked_and_last(server: Running) -> None:
    stream = server.openai().chat.completions.create(
        model="mm/fake", messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 5


def test_images_reach_the_engine_in_their_places(server: Running) -> None:
    parts = [
        {"type": "text", "text": "left"},
        {"type": "image_url", "image_url": {"url": data_url(png("a")), "detail": "auto"}},
        {"type": "image_url", "image_url": data_url(png("b"))},
        {"type": "text", "text": "right"},
    ]
    body = {"messages": [{"role": "user", "content": parts}]}
    answer = server.http().post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == 32
    seen = server.engine.prompts[-1][0].parts
    assert [type(part).__name__ for part in seen] == [
        "TextPart",
        "ImagePart",
        "ImagePart",
        "TextPart",
    ]
    assert seen[1].data == png("a") and seen[1].param == "messages[0].content[1]"


def test_uploaded_file_id_serves_as_image_url(server: Running) -> None:
    file = server.openai().files.create(file=("x.png", png("up")), purpose="vision")
    parts = [{"type": "image_url", "image_url": {"url": file.id}}]
    body = {"messages": [{"role": "user", "content": parts}]}
    assert server.http().post("/v1/chat/completions", json=body).status_code == 200
    assert server.engine.prompts[-1][0].parts[0].data == png("up")


def test_logprobs_are_given_for_each_token(server: Running) -> None:
    answer = server.openai().chat.completions.create(
        model="mm/fake", messages=ASK, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == 5
    assert len(logprobs.content[0].top_logprobs) == 3


def test_length_limit_is_reported(server: Running) -> None:
    answer = server.openai().chat.completions.create(
        model="mm/fake", messages=ASK, max_completion_tokens=2
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content == "you said:"


@pytest.mark.parametrize("value", [None, -1, 5, 10**6, 7.0])
def test_length_fields_that_are_fine(server: Running, value: Any) -> None:
    body = {"messages": ASK, "max_tokens": value}
    assert server.http().post("/v1/chat/completions", json=body).status_code == 200
    expected = None if value in (None, -1) else value
    assert server.engine.params[-1].max_tokens == expected


BAD = [
    ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"max_tokens": -2}, "invalid_value", "max_tokens"),
    ({"max_tokens": 1.5}, "invalid_value", "max_tokens"),
    ({"max_tokens": True}, "invalid_value", "max_tokens"),
    ({"max_tokens": "9"}, "invalid_value", "max_tokens"),
    ({"n": 2}, "unsupported_parameter", "n"),
    ({"temperature": -1}, "invalid_value", "temperature"),
    ({"temperature": True}, "invalid_value", "temperature"),
    ({"top_p": 1.1}, "invalid_value", "top_p"),
    ({"stop": ["a"] * 5}, "invalid_value", "stop"),
    ({"stop": ""}, "invalid_value", "stop"),
    ({"stop": 7}, "invalid_value", "stop"),
    ({"seed": "x"}, "invalid_value", "seed"),
    ({"modalities": ["text", "audio"]}, "unsupported_parameter", "modalities"),
    ({"response_format": {"type": "yaml"}}, "invalid_value", "response_format.type"),
    ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools[0].type"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"top_logprobs": 3}, "invalid_value", "top_logprobs"),
    ({"model": "gpt-x"}, "model_not_found", "model"),
    ({"messages": None}, "missing_required_parameter", "messages"),
    ({"messages": []}, "invalid_value", "messages"),
    ({"messages": "hi"}, "invalid_value", "messages"),
    ({"messages": [7]}, "invalid_value", "messages[0]"),
    ({"messages": [{"content": "x"}]}, "missing_required_parameter", "messages[0].role"),
    ({"messages": [{"role": "king", "content": "x"}]}, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": "user", "content": ""}]}, "invalid_value", "messages[0]"),
    ({"messages": [{"role": "user", "content": []}]}, "invalid_value", "messages[0]"),
    ({"messages": [{"role": "user", "content": None}]}, "invalid_value", "messages[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}]}]},
        "invalid_value",
        "messages[0]",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "unsupported_parameter",
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "missing_required_parameter",
        "messages[0].content[0].image_url",
    ),
    (
        {"messages": [{"role": "user", "content": "\ud800"}]},
        "invalid_value",
        "messages[0].content",
    ),
    ({"continue_final_message": True}, "invalid_value", "continue_final_message"),
    ({"add_generation_prompt": False}, "unsupported_parameter", "add_generation_prompt"),
    ({"logit_bias": {"x": 1}}, "invalid_value", "logit_bias"),
]


@pytest.mark.parametrize(("change", "code", "param"), BAD, ids=[str(b[0])[:60] for b in BAD])
def test_refusals_name_code_and_field(
    server: Running, change: dict[str, Any], code: str, param: str
) -> None:
    body = json.dumps({"messages": ASK, **change})
    answer = server.http().post("/v1/chat/completions", content=body)
    assert answer.status_code == (404 if code == "model_not_found" else 400)
    assert server.engine.num_prepared == 0
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert error["message"] and error["type"] == "invalid_request_error"


def test_unknown_and_harmless_fields_are_ignored(server: Running) -> None:
    body = {
        "messages": ASK,
        "reasoning_format": "auto",
        "timings_per_token": True,
        "user": "u",
        "metadata": {"a": "b"},
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "n": 1,
        "stop": None,
        "logit_bias": {"5": -100},
    }
    assert server.http().post("/v1/chat/completions", json=body).status_code == 200
    assert server.engine.params[-1].logit_bias == {5: -100.0}


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"7", b'{"a":NaN}', b"\xff\xfe{", b"[" * 99999])
def test_bodies_that_are_no_json_object(server: Running, raw: bytes) -> None:
    answer = server.http().post("/v1/chat/completions", content=raw)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


def test_tool_history_with_an_image_is_accepted(server: Running) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    image = {"type": "image_url", "image_url": {"url": data_url(png())}}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [image]},
    ]
    answer = server.http().post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 200
    call_text = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    assert server.engine.prompts[-1][1].parts[0].text == call_text


def test_continuing_an_assistant_prefix(server: Running) -> None:
    messages = [*ASK, {"role": "assistant", "content": "I think"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert server.http().post("/v1/chat/completions", json=body).status_code == 200


def test_fault_in_mid_stream_is_an_error_frame_without_done(server: Running) -> None:
    server.engine.script = "one two crash three"
    with pytest.raises(openai.APIError) as caught:
        list(server.openai().chat.completions.create(model="mm/fake", messages=ASK, stream=True))
    assert caught.value.code == "internal_error"
    answer = server.http().post("/v1/chat/completions", json={"messages": ASK})
    assert answer.status_code == 500
    assert answer.headers["x-should-retry"] == "false"


def test_full_queue_is_429_with_retry_after(server: Running) -> None:
    server.engine.queue_full = True
    for stream in (False, True):
        body = {"messages": ASK, "stream": stream}
        answer = server.http().post("/v1/chat/completions", json=body)
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "queue_full"


def test_leaving_aborts_a_stream_and_a_plain_request(server: Running) -> None:
    server.engine.script, server.engine.hold_at = "word " * 20, 5
    with server.http().stream(
        "POST", "/v1/chat/completions", json={"messages": ASK, "stream": True}
    ) as answer:
        next(answer.iter_lines())
    assert server.idle()
    server.hang_up("/v1/chat/completions", {"messages": ASK})
    assert server.idle()
    assert len(server.engine.aborted) == 2


def test_many_aborted_streams_leave_nothing_behind(server: Running) -> None:
    server.engine.script, server.engine.hold_at = "word " * 20, 5

    def one() -> None:
        for _ in range(10):
            with server.http().stream(
                "POST", "/v1/chat/completions", json={"messages": ASK, "stream": True}
            ) as answer:
                next(answer.iter_lines())

    threads = [threading.Thread(target=one) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.idle()
    assert len(server.engine.aborted) == 50
    server.engine.script, server.engine.hold_at = None, None
    assert server.http().post("/v1/chat/completions", json={"messages": ASK}).status_code == 200


def test_chinese_is_sent_unescaped(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "这张图里有什么？🐈"}]}
    answer = server.http().post("/v1/chat/completions", json=body)
    assert "这张图里有什么？🐈".encode() in answer.content


def test_heartbeat_fills_a_silence(launch: Any) -> None:
    running = launch(heartbeat_s=0.05)
    running.engine.hold_at = 2
    text = ""
    with running.http().stream(
        "POST", "/v1/chat/completions", json={"messages": ASK, "stream": True}
    ) as answer:
        for piece in answer.iter_text():
            text += piece
            if text.count(": keep-alive\n\n") == 5:
                running.engine.hold_at = None
    assert text.endswith("data: [DONE]\n\n")

"""Beam search through Chat Completions, over the real engine of a tiny random model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from mmserve.config import EngineConfig, ServerConfig
from mmserve.engine.async_engine import AsyncEngine
from mmserve.engine.engine import Engine
from mmserve.request import BeamParams, SamplingParams
from tests.engine.driver import picture
from tests.engine.tiny import tiny_config, tiny_model
from tests.server.conftest import Running, data_url, eventually, start
from tests.server.fake_engine import FakeEngine, FakeInfo

PICTURE = picture(3)


def build(config: EngineConfig) -> Engine:
    return Engine(config, tiny_model(1000))


@pytest.fixture
def fresh() -> Iterator[Running]:
    engine = AsyncEngine(tiny_config(), build)
    running, stop = start(ServerConfig(port=0), cast(Any, engine))
    assert eventually(lambda: engine.status == "ok")
    yield running
    stop()


def body(**fields: Any) -> dict[str, Any]:
    content = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": data_url(PICTURE)}},
    ]
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "use_beam_search": True, "max_tokens": 8, **fields}


def post(running: Running, **fields: Any) -> Any:
    answer = running.http().post("/v1/chat/completions", json=body(**fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


def texts(completion: Any) -> list[str]:
    return [choice["message"]["content"] for choice in completion["choices"]]


def test_four_beams_over_a_picture_that_is_new_and_then_known(fresh: Running) -> None:
    """B09: it works both times, and the picture is encoded once."""
    first, second = (post(fresh, n=4) for _ in range(2))
    TypeAdapter(ChatCompletion).validate_python(first)
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
    assert len(set(texts(first))) == 4 and texts(first) == texts(second)
    assert [c["usage"]["cache"]["vision_misses"] for c in (first, second)] == [1, 0]
    assert b"mmserve:vision_encoder_runs_total 1.0" in fresh.http().get("/metrics").content
    usage = first["usage"]
    assert usage["completion_tokens"] == 4 * 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 32
    metrics = fresh.http().get("/metrics").text
    held, copied = (
        float(line.split()[-1])
        for kind in ("held", "copied")
        for line in metrics.splitlines()
        if line.startswith(f'mmserve:beam_kv_bytes_total{{kind="{kind}"}}')
    )
    assert 0 < 1 - held / copied == pytest.approx(usage["cache"]["beam_kv_saved"])


def test_the_best_of_some_beams_is_the_first_of_all(fresh: Running) -> None:
    every = post(fresh, n=4)
    assert texts(post(fresh, best_of=4)) == texts(every)[:1]
    assert texts(post(fresh, n=2, best_of=4)) == texts(every)[:2]
    greedy = post(fresh, use_beam_search=False, temperature=0)
    assert texts(post(fresh)) == texts(post(fresh, n=1)) == texts(greedy)


def test_a_stream_tells_all_answers_at_the_end(fresh: Running) -> None:
    whole = post(fresh, n=3, logprobs=True, top_logprobs=2)
    request = body(n=3, logprobs=True, top_logprobs=2, stream=True)
    request["stream_options"] = {"include_usage": True}
    with fresh.http().stream("POST", "/v1/chat/completions", json=request) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    *chunks, usage = (json.loads(line) for line in lines[:-1])
    said, reasons = ["", "", ""], ["", "", ""]
    logprobs: list[list[Any]] = [[], [], []]
    for chunk in chunks:
        TypeAdapter(ChatCompletionChunk).validate_python(chunk)
        (choice,) = chunk["choices"]
        number = choice["index"]
        said[number] += choice["delta"].get("content", "")
        logprobs[number] += (choice["logprobs"] or {"content": []})["content"]
        reasons[number] = choice["finish_reason"] or ""
    assert said == texts(whole)
    assert logprobs == [choice["logprobs"]["content"] for choice in whole["choices"]]
    assert reasons == [choice["finish_reason"] for choice in whole["choices"]]
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_every_answer_has_the_form_that_is_asked_for(fresh: Running) -> None:
    form = {"choice": ["red", "green", "blue", "a red one"]}
    found = texts(post(fresh, n=3, structured_outputs=form, max_tokens=20))
    assert len(set(found)) == 3 and set(found) <= set(form["choice"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 17}, "n"),
        ({"best_of": 17}, "best_of"),
        ({"n": 3, "best_of": 2}, "n"),
        ({"n": 4, "num_beam_groups": 3}, "num_beam_groups"),
        ({"n": 4, "diversity_penalty": 1}, "diversity_penalty"),
        ({"n": 4, "temperature": 0.5}, "temperature"),
        ({"n": 4, "top_k": 5}, "top_k"),
        ({"n": 4, "early_stopping": "soon"}, "early_stopping"),
        ({"use_beam_search": False, "num_beam_groups": 2}, "num_beam_groups"),
        ({"use_beam_search": False, "n": 2}, "n"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(
    fresh: Running, fields: dict[str, Any], param: str
) -> None:
    answer = fresh.http().post("/v1/chat/completions", json=body(**fields))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_other_surfaces_say_that_they_have_no_beams(fresh: Running) -> None:
    answer = fresh.http().post("/v1/responses", json={"input": "x", "use_beam_search": True})
    assert answer.json()["error"]["code"] == "unsupported_parameter"


def test_a_model_s_own_sampling_is_not_for_beams(launch: Callable[..., Running]) -> None:
    own = SamplingParams(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)
    running = launch(FakeEngine(FakeInfo(default_sampling=own)))
    ask = {"n": 2, "best_of": 6, "num_beam_groups": 3, "diversity_penalty": 0.5}
    more = {"length_penalty": 0.5, "early_stopping": "never"}
    post(running, **ask, **more)
    beams = BeamParams(6, 2, 3, 0.5, 0.5, "never")
    assert running.engine.params[-1] == SamplingParams(8, temperature=0.0, beams=beams)

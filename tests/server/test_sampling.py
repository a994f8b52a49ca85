"""A model's own sampling parameters hold where a request names none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmserve.request import SamplingParams
from tests.server.conftest import Running
from tests.server.fake_engine import FakeEngine, FakeInfo

OWN = SamplingParams(temperature=0.7, top_p=0.8, top_k=20, min_p=0.1, repetition_penalty=1.05)


def sampling(running: Running, **asked: Any) -> SamplingParams:
    """What the engine is given on both surfaces, which is the same."""
    http = running.http()
    assert http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], **asked}
    ).is_success
    assert http.post("/v1/responses", json={"input": "hi", **asked}).is_success
    chat, response = running.engine.params[-2:]
    assert chat == response
    return chat


def test_a_model_s_own_sampling_holds_where_a_request_names_none(
    launch: Callable[..., Running],
) -> None:
    running = launch(FakeEngine(FakeInfo(default_sampling=OWN)))
    assert sampling(running) == OWN
    assert sampling(running, temperature=None, top_k=None) == OWN


def test_a_request_s_own_word_is_the_last(launch: Callable[..., Running]) -> None:
    running = launch(FakeEngine(FakeInfo(default_sampling=OWN)))
    asked = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    assert sampling(running, **asked) == SamplingParams(temperature=0.0)
    assert sampling(running, top_k=-1).top_k == 0

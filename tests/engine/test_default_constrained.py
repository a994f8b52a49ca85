"""The default model, constrained: what it says is right as well as well-formed, and it calls the
tool that a question needs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mmserve.config import CacheConfig, EngineConfig, ModelConfig
from mmserve.engine.engine import Engine
from mmserve.model.loader import load_model
from mmserve.prompt import Message, TextPart
from mmserve.request import Constraint, FinishReason, SamplingParams
from mmserve.tools import HERMES, Tool
from tests.engine.driver import Driver

pytestmark = pytest.mark.model

MIB = 2**20
CAPITAL = {
    "type": "object",
    "properties": {"country": {"type": "string"}, "capital": {"type": "string"}},
    "required": ["country", "capital"],
    "additionalProperties": False,
}
WEATHER = Tool(
    "get_weather",
    "Get the weather in a city.",
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 30}},
        "required": ["city"],
        "additionalProperties": False,
    },
    strict=True,
)


@pytest.fixture(scope="module")
def driver() -> Driver:
    model = ModelConfig(device="cpu")
    cache = CacheConfig(text_bytes=160 * MIB, vision_bytes=64 * MIB)
    return Driver(Engine(EngineConfig(model=model, cache=cache), load_model(model)))


def ask(
    d: Driver,
    question: str,
    constraint: Constraint,
    *,
    tools: tuple[Tool, ...] = (),
    **options: Any,
) -> str:
    described = [tool.described() for tool in tools]
    message = Message("user", (TextPart(question),))
    prompt = d.engine.template.render([message], [], tools=described)
    params = SamplingParams(max_tokens=120, temperature=0.0, constraint=constraint, **options)
    request = d.submit(prompt.segments, params)
    d.run()
    assert d.last(request).finish_reason is FinishReason.STOP, d.text(request)
    return d.text(request)


def test_an_answer_in_json_is_right(driver: Driver) -> None:
    question = "What is the capital of France? Answer in JSON with country and capital."
    said = json.loads(ask(driver, question, Constraint("schema", json.dumps(CAPITAL))))
    assert said["country"].casefold() == "france" and said["capital"] == "Paris"


def test_what_a_pattern_leaves_open_is_the_models_own(driver: Driver) -> None:
    pattern = Constraint("regex", r"The capital of [A-Z][a-z]+ is (London|Paris|Berlin)\.")
    for country, capital in (("France", "Paris"), ("Germany", "Berlin")):
        said = ask(driver, f"What is the capital of {country}?", pattern)
        assert said == f"The capital of {country} is {capital}."


def test_a_required_call_has_arguments_that_fit_the_question(driver: Driver) -> None:
    grammar = HERMES.grammar([WEATHER], required=True, parallel=False)
    constraint = Constraint("grammar", grammar)
    text = ask(driver, "What is the weather in Paris?", constraint, tools=(WEATHER,))
    pieces = HERMES.parser(leading=False).push(text)
    assert pieces[0].text == "get_weather"
    arguments = "".join(piece.text for piece in pieces if piece.kind == "arguments")
    assert "Paris" in json.loads(arguments)["city"]


@pytest.mark.parametrize("question", ["Say hello.", "What is the weather in Paris?"])
def test_a_free_choice_ends_in_text_or_in_a_valid_call(driver: Driver, question: str) -> None:
    grammar = HERMES.grammar([WEATHER], required=False, parallel=False)
    text = ask(driver, question, Constraint("grammar", grammar), tools=(WEATHER,))
    parser = HERMES.parser(leading=False)
    pieces = parser.push(text) + parser.flush()
    assert pieces and pieces[-1].kind in ("text", "end")

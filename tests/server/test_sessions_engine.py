"""Sessions over the real engine, a tiny random model: what is cut costs no image anything, and what
is left answers as a conversation that never had more."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from PIL import Image

from mmserve.config import CacheConfig, EngineConfig, ModelConfig, ServerConfig
from mmserve.engine.async_engine import AsyncEngine
from mmserve.engine.engine import Engine
from mmserve.prompt import ImagePart, Message, Prompt
from mmserve.request import SamplingParams
from tests.engine.tiny import IMAGE_TOKENS, tiny_config, tiny_model
from tests.model import families
from tests.server.conftest import Running, eventually, start

PAGE = 16  # tokens
CONTEXT = 1600
WINDOW = 600
SAMPLED = {"temperature": 1.0, "seed": 5}  # greedily the tiny model says but one thing


def picture(number: int) -> str:
    out = io.BytesIO()
    Image.new("RGB", (20, 20), (number * 40 % 256, number * 90 % 256, 7)).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


class Stock(AsyncEngine):
    """Remembers the messages of every prompt it was asked for."""

    asked: list[list[Message]]

    async def prepare(self, messages: Sequence[Message], **options: Any) -> Prompt:
        self.asked = [*getattr(self, "asked", []), list(messages)]
        return await super().prepare(messages, **options)


class Watched(Stock):
    """Of the tiny model."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, lambda config: Engine(config, tiny_model(CONTEXT)))


def is_ready(engine: AsyncEngine) -> bool:
    return engine.status == "ok"


Served = tuple[Running, Stock]


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Start servers of the tiny model; all are stopped at the end."""
    stops: list[Callable[[], None]] = []

    def begin(**config: Any) -> Served:
        engine = Watched(tiny_config(text_pages=400, vision_pages=80, **config))
        running, stop = start(ServerConfig(port=0), cast(Any, engine))
        stops.append(stop)
        assert eventually(partial(is_ready, engine))
        return running, engine

    yield begin
    for stop in stops:
        stop()


def ask(served: Served, text: str, image: int | None, **body: Any) -> dict[str, Any]:
    running, engine = served
    content: list[dict[str, Any]] = [{"type": "input_text", "text": text}]
    if image is not None:
        content.insert(0, {"type": "input_image", "image_url": picture(image)})
    body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 8, **body}
    answer = running.http().post("/v1/responses", json={**SAMPLED, **body})
    assert answer.status_code == 200, answer.text
    # The layout behind a cut is computed before the test goes on.
    services = running.services
    assert eventually(lambda: not (services.background or services.jobs or engine._generations))
    response: dict[str, Any] = answer.json()
    return response


def talk(served: Served, count: int, **policy: Any) -> list[dict[str, Any]]:
    """Turns with a picture each."""
    turns: list[dict[str, Any]] = []
    parent: dict[str, Any] = {"session_policy": {"window": WINDOW, **policy}}
    for i in range(count):
        turns.append(ask(served, f"question {i}".ljust(60), i, **parent))
        parent = {"previous_response_id": turns[-1]["id"]}
    return turns


def count(served: Served, name: str) -> float:
    counter = getattr(served[1].engine.metrics, name)
    return float(counter.collect()[0].samples[0].value)


def text_of(response: dict[str, Any]) -> str:
    return str(response["output"][0]["content"][0]["text"])


def test_pictures_of_dropped_turns_are_read_as_they_are(serve: Callable[..., Served]) -> None:
    served = serve()
    turns = talk(served, 12)
    assert count(served, "vision_encoder_runs") == count(served, "vision_kv_writes") == 12
    again = ask(served, "the first?", 0, previous_response_id=turns[-1]["id"])
    assert count(served, "vision_encoder_runs") == count(served, "vision_kv_writes") == 12
    assert again["session"]["dropped_items"] > 12 and again["session"]["kept_images"] == 13
    assert again["usage"]["input_tokens_details"]["image_tokens"] == 13 * IMAGE_TOKENS
    assert again["usage"]["cache"]["vision_misses"] == 0


def test_the_turn_after_a_cut_computes_little_beside_its_own_tokens(
    serve: Callable[..., Served],
) -> None:
    turns = talk(serve(), 9)
    dropped = [turn["session"]["dropped_items"] for turn in turns]
    behind = [i for i in range(1, 9) if dropped[i] > dropped[i - 1]]
    assert behind, "no turn was cut"
    own = len("<|im_start|>user\nImage 1: " + "question 1".ljust(60))
    own += len("\n<|im_end|>\n<|im_start|>assistant\n") + IMAGE_TOKENS
    for i in behind:
        details = turns[i]["usage"]["input_tokens_details"]
        assert details["cache_write_tokens"] <= own + 2 * PAGE


@pytest.mark.parametrize("policy", [{}, {"images": 2}, {"images": "pinned"}, {"summary": True}])
def test_answers_are_those_of_a_conversation_that_never_had_more(
    serve: Callable[..., Served], policy: dict[str, Any]
) -> None:
    served = serve()
    turns = talk(served, 8, **policy)
    assert turns[-1]["session"]["dropped_items"] > 0
    fresh = Watched(tiny_config(text_pages=400, vision_pages=80, prefix_caching=False))

    async def replay(messages: list[Message]) -> str:
        """The same messages, as far as a model sees them, to an engine that has cached nothing."""
        params = SamplingParams(max_tokens=8, temperature=1.0, seed=5)
        generation = fresh.submit(str(id(messages)), await fresh.prepare(messages), params)
        return "".join([event.text async for event in generation])

    async def replay_all() -> list[str]:
        await fresh.start()
        try:
            return [await replay(messages) for messages in asked]
        finally:
            await fresh.stop()

    # Each turn's last prompt ends with its own question.
    asked = []
    for i in range(8):
        ends = [m for m in served[1].asked if _last_text(m) == f"question {i}".ljust(60)]
        asked.append(ends[-1])
    assert asyncio.run(replay_all()) == [text_of(turn) for turn in turns]
    kept = [p for m in asked[-1] for p in m.parts if isinstance(p, ImagePart)]
    assert kept[-1].number == 8


def _last_text(messages: list[Message]) -> str | None:
    return getattr(messages[-1].parts[-1], "text", None)


def test_an_answer_that_outgrows_its_window_goes_on_and_says_what_it_left(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    first = talk(served, 2)[-1]
    body = {"previous_response_id": first["id"], "ignore_eos": True}
    long = ask(served, "tell me", None, max_output_tokens=2000, **body)
    assert long["usage"]["output_tokens"] == 2000 > CONTEXT
    assert long["session"]["dropped_tokens"] > 400
    on = ask(served, "and now?", None, previous_response_id=long["id"])
    assert on["status"] in ("completed", "incomplete")
    assert on["usage"]["input_tokens_details"]["text_tokens"] <= WINDOW
    assert on["session"]["kept_images"] == 2


@pytest.mark.parametrize("mode", ["prefix", "blend"])
def test_a_stock_checkpoint_answers_as_without_what_was_dropped(mode: str, tmp_path: Path) -> None:
    """In prefix mode to the token; in blend mode it says that it approximates."""
    model = ModelConfig(
        model=str(families.build("qwen2_5_vl", tmp_path)), device="cpu", vision_mode=mode
    )
    answers = []
    for caching in (True, False):
        cache = CacheConfig(text_bytes=1 << 22, vision_bytes=1 << 22, prefix_caching=caching)
        engine = Stock(EngineConfig(model, cache))
        running, stop = start(ServerConfig(port=0), cast(Any, engine))
        assert eventually(partial(is_ready, engine))
        turns = talk((running, engine), 5, window=200)
        stop()
        assert turns[-1]["session"]["dropped_items"] > 0
        assert turns[-1]["session"]["kept_images"] == 5
        assert turns[-1]["session"]["approximate"] == (mode == "blend")
        answers.append([text_of(turn) for turn in turns])
    assert answers[0] == answers[1] or mode == "blend"

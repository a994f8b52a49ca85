"""`detail` of an image, over Chat Completions and Responses, a tiny model with nested latents
behind: what it costs is in the usage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import httpx
import pytest

from mmserve.config import ServerConfig
from mmserve.engine.async_engine import AsyncEngine
from mmserve.engine.engine import Engine
from tests.engine.driver import picture
from tests.engine.tiny import IMAGE_TOKENS, NESTED, tiny_config, tiny_model
from tests.server.conftest import Running, data_url, eventually, start

URL = data_url(picture(5))
COUNTS = [(None, IMAGE_TOKENS), ("auto", IMAGE_TOKENS), ("high", IMAGE_TOKENS)]
COUNTS += [("original", IMAGE_TOKENS), ("low", NESTED[0])]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    engine = AsyncEngine(tiny_config(), lambda config: Engine(config, tiny_model(sizes=NESTED)))
    made, stop = start(ServerConfig(port=0), cast(Any, engine))
    assert eventually(lambda: httpx.get(f"{made.url}/health").status_code == 200)
    yield made
    stop()


@pytest.mark.parametrize(("detail", "tokens"), COUNTS)
def test_chat_takes_as_many_image_tokens_as_the_detail(
    running: Running, detail: str | None, tokens: int
) -> None:
    image: dict[str, Any] = {"url": URL} | ({"detail": detail} if detail else {})
    content = [{"type": "image_url", "image_url": image}, {"type": "text", "text": "What?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    answer = running.http().post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == tokens


def test_a_model_says_what_its_details_take(running: Running) -> None:
    (model,) = running.http().get("/v1/models").json()["data"]
    assert model["image_details"] == {detail: tokens for detail, tokens in COUNTS if detail}
    assert "image_crops" not in model and model["image_tokens"] == NESTED[0]


def test_a_stored_turn_keeps_the_detail_of_its_image(running: Running) -> None:
    http = running.http()
    image = {"type": "input_image", "image_url": URL, "detail": "low"}
    first = http.post(
        "/v1/responses",
        json={"input": [{"role": "user", "content": [image]}], "max_output_tokens": 16},
    ).json()
    assert first["usage"]["input_tokens_details"]["image_tokens"] == NESTED[0]
    then = http.post(
        "/v1/responses",
        json={"previous_response_id": first["id"], "input": "And?", "max_output_tokens": 16},
    ).json()
    details = then["usage"]["input_tokens_details"]
    assert details["image_tokens"] == details["cached_image_tokens"] == NESTED[0]

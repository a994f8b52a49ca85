"""The real engine, a tiny random model: forgetting one image of twenty touches no other's KV, and
the next turn computes nothing but itself."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from mmserve.config import EngineConfig, ModelConfig, ServerConfig
from mmserve.engine.async_engine import AsyncEngine
from mmserve.engine.engine import Engine
from tests.engine.driver import picture
from tests.engine.tiny import IMAGE_TOKENS, tiny_config, tiny_model
from tests.model import families
from tests.server.conftest import Running, data_url, eventually, start

PAGE = 16  # tokens
COUNT = 20
SAMPLED = {"temperature": 1.0, "seed": 3, "max_output_tokens": 8}


class Talk:
    """A conversation with a server of its own."""

    def __init__(self, engine: AsyncEngine, running: Running) -> None:
        self.engine = engine
        self.http = running.http()
        self.last: dict[str, Any] = {}

    def ask(self, text: str, image: bytes | None = None) -> dict[str, Any]:
        content: list[dict[str, Any]] = [{"type": "input_text", "text": text}]
        if image is not None:
            content.append({"type": "input_image", "image_url": data_url(image)})
        body = {"input": [{"role": "user", "content": content}], **SAMPLED}
        answer = self.http.post(
            "/v1/responses", json=body | {"previous_response_id": self.last.get("id")}
        )
        assert answer.status_code == 200, answer.text
        self.last = answer.json()
        return self.last

    def images(self) -> list[dict[str, Any]]:
        data: list[dict[str, Any]]
        data = self.http.get(f"/v1/responses/{self.last['id']}/images").json()["data"]
        return data

    def act(self, image: dict[str, Any], action: str, **body: str) -> dict[str, Any]:
        path = f"/v1/responses/{self.last['id']}/images/{image['sha256']}/{action}"
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        changed: dict[str, Any] = answer.json()
        return changed

    def forget(self, image: dict[str, Any], mode: str) -> None:
        before = self.count("prompt_tokens")
        self.act(image, "forget", mode=mode)
        # The new layout is computed while nobody waits.
        assert eventually(lambda: self.count("prompt_tokens") > before)
        assert eventually(lambda: not self.engine._generations)

    def count(self, name: str) -> float:
        counter = getattr(self.engine.engine.metrics, name)
        return float(counter.collect()[0].samples[0].value)

    def vision_work(self) -> tuple[float, float]:
        return self.count("vision_encoder_runs"), self.count("vision_kv_writes")


@pytest.fixture
def talk() -> Iterator[Any]:
    """Begin conversations; their servers are stopped at the end."""
    stops = []

    def begin(checkpoint: Path | None = None, **config: Any) -> Talk:
        """Of a public checkpoint, whose images see what is before them, or the native model."""
        settings = tiny_config(text_pages=600, vision_pages=80, **config)
        if checkpoint is None:
            engine = AsyncEngine(
                settings, lambda config: Engine(config, tiny_model(max_model_len=5000))
            )
        else:
            model = ModelConfig(model=str(checkpoint), device="cpu", vision_mode="prefix")
            pools = replace(settings.cache, text_bytes=1 << 22, vision_bytes=1 << 22)
            engine = AsyncEngine(EngineConfig(model, pools))
        running, stop = start(ServerConfig(port=0), cast(Any, engine))
        stops.append(stop)
        assert eventually(lambda: httpx.get(f"{running.url}/health").status_code == 200)
        return Talk(engine, running)

    yield begin
    for stop in stops:
        stop()


def computed(response: dict[str, Any]) -> int:
    details = response["usage"]["input_tokens_details"]
    return int(details["cache_write_tokens"])


@pytest.mark.parametrize("mode", ["recompute", "mark"])
def test_forgetting_the_oldest_of_twenty_images_costs_the_others_nothing(
    talk: Any, mode: str
) -> None:
    conversation = talk()
    for i in range(COUNT):
        conversation.ask(f"question {i}", picture(i))
    normal = computed(conversation.ask("an ordinary turn"))
    before = conversation.images()
    work = conversation.vision_work()
    assert work == (COUNT, COUNT)
    conversation.forget(before[0], mode)
    response = conversation.ask("an ordinary turn")
    assert conversation.vision_work() == work, "an image was seen or written again"
    assert computed(response) <= normal + PAGE
    details = response["usage"]["input_tokens_details"]
    assert details["image_tokens"] == details["cached_image_tokens"] == (COUNT - 1) * IMAGE_TOKENS
    after = conversation.images()
    assert [i["state"] for i in after[1:]] == ["active"] * (COUNT - 1)
    assert [i["bytes"] for i in after[1:]] == [i["bytes"] for i in before[1:]]
    assert after[0]["forgotten"] == mode
    again = conversation.ask("an ordinary turn")
    assert computed(again) <= normal + PAGE and conversation.vision_work() == work


def test_without_the_image_an_answer_is_what_it_is_without_a_cache(talk: Any) -> None:
    """To recompute is exact: hit = miss."""
    answers = []
    for caching in (True, False):
        conversation = talk(prefix_caching=caching)
        for i in range(3):
            conversation.ask(f"question {i}", picture(i))
        conversation.forget(conversation.images()[0], "recompute")
        for text in ("and now?", "why?"):
            answers.append(conversation.ask(text)["output"][0]["content"][0]["text"])
    assert answers[:2] == answers[2:] and answers[0] != answers[1]


def test_an_image_asked_for_again_by_its_item_is_not_computed_again(talk: Any) -> None:
    conversation = talk()
    for i in range(3):
        conversation.ask(f"question {i}", picture(i))
    item = conversation.images()[0]["item_id"]
    work = conversation.vision_work()
    content = [
        {"type": "input_text", "text": "And this one?"},
        {"type": "input_image", "item_id": item},
    ]
    body = {"input": [{"role": "user", "content": content}], **SAMPLED}
    response = conversation.http.post("/v1/responses", json=body).json()
    assert response["usage"]["cache"]["vision_hits"] == 1
    assert conversation.vision_work() == work
    assert conversation.images()[0]["hits"] >= 1


def crowd(conversation: Talk) -> None:
    """Others' images, more than the pool has room for."""
    mine = conversation.last
    for i in range(1, 60):  # there is room for 40
        conversation.last = {}
        conversation.ask("others", picture(i))
    conversation.last = mine


def test_a_pinned_image_outlives_a_pool_full_of_others(talk: Any) -> None:
    conversation = talk()
    conversation.ask("mine", picture(0))
    (image,) = conversation.images()
    assert conversation.act(image, "pin")["data"][0]["pinned"]
    crowd(conversation)
    work = conversation.vision_work()
    assert conversation.images()[0]["state"] == "active"
    conversation.ask("and now?")
    assert conversation.vision_work() == work


def test_a_pin_brings_back_an_image_that_had_to_go(talk: Any) -> None:
    conversation = talk()
    conversation.ask("mine", picture(0))
    crowd(conversation)
    (image,) = conversation.images()
    assert image["state"] != "active"
    conversation.act(image, "pin")
    assert eventually(lambda: conversation.images()[0]["state"] == "active")


def test_in_prefix_mode_a_forgotten_image_is_exact_too_and_paid_for_ahead(
    talk: Any, tmp_path: Path
) -> None:
    """Those behind it saw it, so they are computed again; but not by the next turn."""
    answers = []
    for caching in (True, False):
        conversation = talk(families.build("qwen2_5_vl", tmp_path), prefix_caching=caching)
        for i in range(3):
            file = io.BytesIO()
            families.picture(i, 140, 126).save(file, "PNG")
            conversation.ask(f"question {i}", file.getvalue())
        normal = computed(conversation.ask("an ordinary turn"))
        work = conversation.vision_work()
        conversation.forget(conversation.images()[0], "recompute")
        ahead = conversation.vision_work()
        response = conversation.ask("an ordinary turn")
        answers.append(response["output"][0]["content"][0]["text"])
        if caching:
            assert ahead[1] == work[1] + 2
            assert conversation.vision_work() == ahead
            assert computed(response) <= normal + PAGE
    assert answers[0] == answers[1]

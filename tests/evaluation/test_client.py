"""Examples as requests, and the whole command against a server of the tiny model."""

from __future__ import annotations

import base64
import io
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from PIL import Image

from mmserve.__main__ import main
from mmserve.config import ServerConfig
from mmserve.engine.async_engine import AsyncEngine
from mmserve.engine.engine import Engine
from mmserve.evaluation.client import ServerError, connect, messages
from mmserve.evaluation.report import BEGIN, END
from mmserve.vision.train.example import Example, Turn
from tests.engine.tiny import tiny_config, tiny_model
from tests.server.conftest import eventually, start
from tests.vision.train.archive import small_archive


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine = AsyncEngine(
        tiny_config(text_pages=400, vision_pages=80),
        lambda config: Engine(config, tiny_model(max_model_len=3000)),
    )
    running, stop = start(ServerConfig(port=0), cast(Any, engine))
    assert eventually(lambda: httpx.get(f"{running.url}/health").status_code == 200)
    yield running.url
    stop()


def test_a_turn_brings_its_images_and_the_answers_before_it() -> None:
    images = tuple(Image.new("RGB", (4, 4), color) for color in ("red", "blue"))
    turns = (Turn("And?", "A", shows=(0,)), Turn("Or?", "B", shows=(1,)), Turn("So?", "C"))
    sent = messages(Example("x", images, turns), "low")
    assert [m["role"] for m in sent] == ["user", "assistant", "user", "assistant", "user"]
    assert [m["content"] for m in sent if m["role"] == "assistant"] == ["A", "B"]
    shown = [p["image_url"] for m in sent for p in m["content"] if "image_url" in p]
    assert [image["detail"] for image in shown] == ["low", "low"]
    for image, url in zip(images, (image["url"] for image in shown), strict=True):
        decoded = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
        assert decoded.tobytes() == image.tobytes()


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(ServerError, match=nowhere):
            connect(nowhere, "none")


def test_a_server_is_evaluated_into_json_and_card(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive, results, card = (tmp_path / name for name in ("assets.zip", "r.json", "card.md"))
    small_archive(archive)
    card.write_text(f"{BEGIN}\n{END}\n", "utf-8")
    skills = ["colour", "caption", "by_turn"]
    command = ["eval", "--n", "2", "--url", url, "--assets", str(archive), "--json", str(results)]
    main([*command, "--card", str(card), *(f for s in skills for f in ("--skill", s))])

    table = capsys.readouterr().out.strip()
    assert f"{BEGIN}\n{table}\n{END}\n" == card.read_text("utf-8")
    rows = json.loads(results.read_text("utf-8"))["results"]
    assert [row["name"] for row in rows] == [
        "colour",
        "colour, low detail",
        *skills[1:3],
        *skills[3:],
    ]
    assert all(row["n"] == 2 and row["right"] + len(row["wrong"]) == 2 for row in rows)

"""Pictures of strangers over the API, the tiny model behind it: each is shown or refused by name,
before any token, and the next request is answered as if nothing had been.

They are decoded in a process beside, as `mmserve serve` has it; the same one lives to the end.
"""

from __future__ import annotations

import base64
import logging
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote_from_bytes

import httpx
import pytest
from PIL import Image

from mmserve.config import DecodingConfig, ServerConfig
from mmserve.engine.async_engine import AsyncEngine
from mmserve.engine.engine import Engine
from tests.engine.driver import picture
from tests.engine.tiny import IMAGE_TOKENS, tiny_config, tiny_model
from tests.server.conftest import Running, data_url, eventually, start
from tests.vision.images import encode, plain_png
from tests.vision.strangers import oriented, strangers

RED, BLUE = (encode(Image.new("RGB", (224, 224), colour), "PNG") for colour in ("red", "blue"))
GOOD = picture(77)


class Served:
    """A server of its own and what it is asked."""

    def __init__(self, engine: AsyncEngine, running: Running) -> None:
        self.engine, self.running = engine, running
        self.http = running.http()

    def post(self, *parts: Any, **body: Any) -> httpx.Response:
        """One chat turn; bytes are pictures."""
        content = [image(p) if isinstance(p, bytes) else p for p in parts]
        return self.chat([{"role": "user", "content": content}], **body)

    def chat(self, messages: list[Any], **body: Any) -> httpx.Response:
        body = {"max_tokens": 6, "messages": messages, **body}
        return self.http.post("/v1/chat/completions", json=body)

    def ask(self, *parts: Any, **body: Any) -> dict[str, Any]:
        answer = self.post(*parts, **body)
        assert answer.status_code == 200, answer.text
        made: dict[str, Any] = answer.json()
        return made

    def says(self, *parts: Any, **body: Any) -> str:
        return str(self.ask(*parts, **body)["choices"][0]["message"]["content"])

    def count(self, name: str) -> float:
        counter = getattr(self.engine.engine.metrics, name)
        return float(counter.collect()[0].samples[0].value)

    def process(self) -> int:
        """The id of the one that decodes."""
        pipeline = cast(Any, self.engine.engine.pipeline)
        return int(pipeline.decoder._workers[0]._child.pid)


def image(data: bytes | str) -> dict[str, Any]:
    url = data if isinstance(data, str) else data_url(data)
    return {"type": "image_url", "image_url": {"url": url}}


def serve(**config: Any) -> Iterator[Served]:
    settings = replace(tiny_config(**config), decoding=DecodingConfig(1))
    engine = AsyncEngine(settings, lambda config: Engine(config, tiny_model(max_model_len=320)))
    running, stop = start(ServerConfig(port=0), cast(Any, engine))
    assert eventually(lambda: httpx.get(f"{running.url}/health").status_code == 200)
    yield Served(engine, running)
    stop()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    yield from serve(text_pages=400)


@pytest.fixture(scope="module")
def narrow() -> Iterator[Served]:
    """The vision pool has room for four pictures."""
    yield from serve(text_pages=400, vision_pages=8)


def memory(process: int) -> int:
    """Resident pages."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1])


def test_every_strangers_file_is_shown_or_refused_by_name_and_the_next_is_answered(
    served: Served,
) -> None:
    """B29, B31, B32, B33, one by one; of some more of them memory stays where it is."""
    expected = served.says("What?", GOOD)
    process, files, levels = served.process(), strangers(), []
    for some in (files, files[::4]):
        for name, data, code in some:
            answer = served.post("What?", data, max_tokens=1)
            if code is None:
                assert answer.status_code == 200, (name, answer.text)
                details = answer.json()["usage"]["prompt_tokens_details"]
                assert details["image_tokens"] == IMAGE_TOKENS, name
            else:
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (400, code), (name, error)
                assert error["param"] == "messages[0].content[1]" and len(error["message"]) < 400
        assert served.says("What?", GOOD) == expected
        assert served.process() == process, "no file ended the process"
        if sys.platform == "linux":
            levels.append(memory(process))
    assert not levels or levels[1] <= levels[0] * 1.1


def test_each_way_in_gives_the_same_refusal(served: Served) -> None:
    """An upload, a data URL of either surface and a Realtime item go one way; B32."""
    cut = GOOD[:-6]
    codes = [served.post(cut).json()["error"]["code"]]
    part = {"type": "input_image", "image_url": data_url(cut)}
    turn = {"input": [{"role": "user", "content": [part]}]}
    codes.append(served.http.post("/v1/responses", json=turn).json()["error"]["code"])
    upload = {"file": ("a.png", cut, "image/png")}
    answer = served.http.post("/v1/files", files=upload, data={"purpose": "vision"})
    codes.append(answer.json()["error"]["code"])
    assert codes == ["invalid_image"] * 3


def test_all_eight_orientations_of_a_picture_are_answered_alike(served: Served) -> None:
    """B29: also values that mean nothing."""
    assert len({served.says("What?", oriented(value)) for value in range(10)}) == 1


def test_a_bomb_is_refused_from_its_header_and_never_logged(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """B33: 12 in one request, and 8 requests at once."""
    caplog.set_level(logging.DEBUG)
    bomb = plain_png(14_000, 14_000)
    decoded = served.count("image_decodes")
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: served.post(*[bomb] * 12), range(8)))
    assert {answer.json()["error"]["code"] for answer in answers} == {"image_too_large"}
    assert served.count("image_decodes") == decoded
    payload = base64.b64encode(bomb).decode()[:60]
    assert payload not in caplog.text and not any(payload in a.text for a in answers)


def test_a_second_picture_never_gets_the_firsts_answer(served: Served) -> None:
    """B01: red, blue, red; blue has nothing of red's."""
    red, blue, again = (served.ask("What is this?", data) for data in (RED, BLUE, RED))
    cached = [a["usage"]["prompt_tokens_details"]["cached_image_tokens"] for a in (blue, again)]
    assert cached == [0, IMAGE_TOKENS]
    texts = [answer["choices"][0]["message"]["content"] for answer in (red, blue, again)]
    assert texts[0] == texts[2] != texts[1]


def test_adding_a_second_picture_finds_all_up_to_the_first(served: Served) -> None:
    """B07."""
    one, two = picture(801), picture(802)
    served.ask("Hello", one)
    details = served.ask("Hello", one, two)["usage"]["prompt_tokens_details"]
    assert details["cached_image_tokens"] == IMAGE_TOKENS


def test_a_pool_of_four_pictures_serves_twelve_to_eight_clients(
    served: Served, narrow: Served
) -> None:
    """B08, B10: only slower, and each turn is about the picture it was sent with."""
    pictures = [picture(900 + i) for i in range(12)]
    expected = [served.says("Which?", data) for data in pictures]
    order = [(7 * i * i + i) % 12 for i in range(48)]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda i: narrow.says("Which?", pictures[i]), order))
    assert answers == [expected[i] for i in order]


def test_a_fixed_picture_is_computed_once_however_long_the_answer(served: Served) -> None:
    """B09, B12: one encoder run and one write, for four answers of 40 tokens."""
    before = served.count("vision_encoder_runs"), served.count("vision_kv_writes")
    served.ask("Tell", picture(555), max_tokens=40, n=4, use_beam_search=True)
    served.ask("Tell", picture(555), max_tokens=40)
    after = served.count("vision_encoder_runs"), served.count("vision_kv_writes")
    assert after == (before[0] + 1, before[1] + 1)


B64 = base64.b64encode(GOOD).decode()
FORMS = {
    f"data:image/png;charset=utf-8;base64,{B64}": None,
    f"data:image;base64,{B64}": None,
    f"data:;base64,{B64}": None,
    f"DATA:IMAGE/PNG;BASE64,{B64}": None,
    f"data:image/png;base64,{B64.rstrip('=')}": None,
    f"data:image/png;base64,{base64.urlsafe_b64encode(GOOD).decode()}": None,
    f"data:image/png;base64,{B64[:30]}\r\n{B64[30:]}\n": None,
    f"data:image/png,{quote_from_bytes(GOOD, safe='')}": None,
    f"data:image/jpeg;base64,{B64}": None,
    f"data:text/html;base64,{B64}": None,
    f"data:image/png;base64{B64}": "invalid_image",
    "data:image/png;base64,": "invalid_image",
    "data:": "invalid_image",
    "data:image/png;base64,@@@": "invalid_image",
    "data:text/html;base64,PGh0bWw+": "unsupported_image_type",
    B64: "image_url_not_allowed",
    "": "image_url_not_allowed",
    "https://example.org/a.png": "image_url_not_allowed",
    "http://169.254.169.254/latest": "image_url_not_allowed",
    "file:///etc/passwd": "image_url_not_allowed",
}


def test_every_legal_data_url_shows_its_picture_and_the_rest_has_a_reason(served: Served) -> None:
    """B40: the bytes decide the type."""
    expected = served.says("What?", GOOD)
    for url, code in FORMS.items():
        answer = served.post("What?", image(url))
        if code is None:
            assert answer.json()["choices"][0]["message"]["content"] == expected, url[:40]
        else:
            assert answer.json()["error"]["code"] == code, url[:40]


CONTENTS: list[Any] = ["", [], None, [{"type": "text", "text": ""}], "Hello", [image(GOOD)]]
ODD: list[tuple[Any, Any]] = [(content, 2) for content in CONTENTS]
ODD += [("Hello", limit) for limit in (None, 0, 1, 10**9, -1, -2, 1.5, "7", True)]


@pytest.mark.parametrize("number", range(len(ODD)), ids=lambda i: str(ODD[i])[:40])
def test_odd_contents_and_limits_are_answered_or_refused_by_name(
    served: Served, number: int
) -> None:
    """B41: whatever they are, no fault of ours."""
    content, limit = ODD[number]
    answer = served.chat([{"role": "user", "content": content}], max_tokens=limit)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["param"] and answer.json()["error"]["message"]
    if content in ("Hello", CONTENTS[-1]) and limit in (None, 2, 10**9, -1):
        assert answer.status_code == 200


def test_an_empty_answer_of_the_assistant_goes_on(served: Served) -> None:
    """B41."""
    for content in CONTENTS[:3]:
        turns = [
            {"role": "user", "content": ["What?", image(GOOD)]},
            {"role": "assistant", "content": content},
            {"role": "user", "content": "And?"},
        ]
        assert served.chat(turns).status_code == 200


def test_a_picture_in_a_tools_result_is_seen_and_the_talk_goes_on(served: Served) -> None:
    """B45."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}

    def turns(data: bytes) -> list[Any]:
        return [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [image(data)]},
        ]

    answers = [served.chat(turns(data)) for data in (RED, BLUE)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    details = answers[0].json()["usage"]["prompt_tokens_details"]
    assert details["image_tokens"] == IMAGE_TOKENS
    broken = served.chat(turns(GOOD[:-6]))
    assert broken.json()["error"]["code"] == "invalid_image"
    more = [*turns(RED), {"role": "assistant", "content": "Red."}, {"role": "user", "content": "?"}]
    assert served.chat(more).status_code == 200

"""Twenty images in a conversation with the served default model; the oldest is forgotten, in both
ways, and the next turn's first token is timed against an ordinary turn's.

Run: python tests/checks/lifetime.py [--url http://127.0.0.1:8000]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

sys.path.append(str(Path(__file__).parents[2]))

from tests.checks.served import Served, given, input_parts, picture

COUNT = 20
TURNS = 5  # timed, of each kind
QUESTION = "And what color?"
LIMIT = 1.5  # what the next turn's first token may take, in ordinary turns


@dataclass
class Talk:
    """A chain of responses; `last` is the newest one's id."""

    served: Served
    last: str | None = None

    def ask(self, *parts: bytes | str) -> float:
        """Seconds to the first token."""
        started, first = time.monotonic(), None
        stream = self.served.client().responses.create(
            model=self.served.model(),
            input=[{"role": "user", "content": input_parts(*parts)}],
            previous_response_id=self.last,
            max_output_tokens=8,
            stream=True,
        )
        for event in stream:
            if event.type == "response.output_text.delta" and first is None:
                first = time.monotonic() - started
            if event.type in ("response.completed", "response.incomplete"):
                self.last = event.response.id
        assert first is not None
        return first

    def images(self) -> list[dict[str, Any]]:
        url = f"{self.served.url}/v1/responses/{self.last}/images"
        data: list[dict[str, Any]] = httpx.get(url).json()["data"]
        return data

    def act(self, image: dict[str, Any], action: str, **body: str) -> None:
        """And wait until the new layout that it makes has been computed."""
        url = f"{self.served.url}/v1/responses/{self.last}/images/{image['sha256']}/{action}"
        ended = self.served.metric("e2e_request_latency_seconds_count")
        httpx.post(url, json=body).raise_for_status()
        while self.served.metric("e2e_request_latency_seconds_count") == ended:
            time.sleep(0.01)

    def vision_work(self) -> tuple[float, float]:
        return (
            self.served.metric("vision_encoder_runs_total"),
            self.served.metric("vision_kv_writes_total"),
        )


def check(served: Served) -> None:
    talk = Talk(served)
    for seed in range(COUNT):
        talk.ask(picture(seed), f"What shape is in image {seed + 1}?")
    talk.ask(QUESTION)
    work = talk.vision_work()
    for mode in ("recompute", "mark"):
        ordinary, after = [], []
        for number in range(TURNS):
            ordinary.append(talk.ask(QUESTION))
            image = talk.images()[number]
            talk.act(image, "forget", mode=mode)
            after.append(talk.ask(QUESTION))
            talk.act(image, "restore")
        ratio = statistics.median(after) / statistics.median(ordinary)
        shown = ", ".join(f"{statistics.median(times) * 1e3:.0f} ms" for times in (ordinary, after))
        print(f"{mode}: an ordinary turn and the next one {shown} to the first token, {ratio:.2f}")
        assert ratio <= LIMIT, (ordinary, after)
    assert talk.vision_work() == work, "an image was seen or written again"
    print(f"no image of {COUNT} was seen or written again")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url")
    with given(parser.parse_args().url) as served:
        check(served)

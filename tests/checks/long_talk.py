"""Five hundred turns with the served default model in a window of 512 tokens: memory and
time per token stay as they are, and the picture of turn 3 is asked about at turn 490 without being
sent, or looked at, again.

Run: python tests/checks/long_talk.py [--turns 500] [--url http://127.0.0.1:8000]
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

sys.path.append(str(Path(__file__).parents[2]))

from tests.checks.endless import print_slopes
from tests.checks.served import Served, given, input_parts, picture

WINDOW, PINNED = 512, 3
QUESTION = "What shape is in image 1?"
TOPICS = ("the sea", "bread", "a small dog", "rain", "old books", "the moon", "music", "a red kite")
DRAWN = 17  # the seed of the pinned picture


@dataclass
class Talk:
    served: Served
    model: str
    last: str | None = None
    session: dict[str, Any] | None = None

    def ask(self, *parts: bytes | str) -> tuple[str, float]:
        """The answer, and milliseconds between its tokens, the median."""
        text, times = "", list[float]()
        stream = self.served.client().responses.create(
            model=self.model,
            input=[{"role": "user", "content": input_parts(*parts)}],
            previous_response_id=self.last,
            max_output_tokens=24,
            stream=True,
            extra_body={"session_policy": {"window": WINDOW, "images": "pinned"}},
        )
        for event in stream:
            if event.type == "response.output_text.delta":
                text += event.delta
                times.append(1e3 * time.monotonic())
            elif event.type in ("response.completed", "response.incomplete"):
                self.last = event.response.id
                self.session = event.response.model_dump().get("session")
        gaps = [b - a for a, b in itertools.pairwise(times)]
        return text, median(gaps) if gaps else 0.0

    def pin(self) -> None:
        """The only image."""
        url = f"{self.served.url}/v1/responses/{self.last}/images"
        (image,) = httpx.get(url).json()["data"]
        httpx.post(f"{url}/{image['sha256']}/pin").raise_for_status()


def check(served: Served, turns: int = 500) -> None:
    talk = Talk(served, served.model())
    pace, memory = list[float](), list[float]()
    first, again, images, runs = "", "", 0, 0.0
    for turn in range(1, turns + 1):
        question: tuple[bytes | str, ...] = (f"Tell me something about {TOPICS[turn % 8]}.",)
        if turn == PINNED:
            question = (picture(DRAWN), QUESTION)
        elif turn == turns - 10:
            runs = served.metric("vision_encoder_runs_total")
            question = (QUESTION,)
        elif turn % 20 == 0:
            question = (picture(1000 + turn), "What color is the newest shape?")
        images += isinstance(question[0], bytes)
        answer, between = talk.ask(*question)
        pace.append(between)
        memory.append(served.memory() / 2**20)
        if turn == PINNED:
            first = answer
            talk.pin()
        elif turn == turns - 10:
            again = answer
            assert served.metric("vision_encoder_runs_total") == runs, "it was looked at again"
        if turn % (turns // 10) == 0:
            tenth = pace[-turns // 10 :]
            print(f"{turn:4d} {memory[-1]:8.1f} MiB {median(tenth):6.1f} ms", flush=True)
    print(f"turn {PINNED}: {first!r}; turn {turns - 10}: {again!r}; {talk.session}")
    assert served.metric("vision_encoder_runs_total") == images, "an image was looked at twice"
    assert again == first
    print_slopes({"ms per token": pace, "MiB resident": memory})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=500)
    parser.add_argument("--url")
    arguments = parser.parse_args()
    with given(arguments.url) as served:
        check(served, arguments.turns)

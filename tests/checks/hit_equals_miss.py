"""The same picture in another conversation, place and company gives a cold server's answer, and
nothing about it is computed again.

Run: python tests/checks/hit_equals_miss.py   (starts its own servers)
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from tests.checks.served import Served, ask, picture, serving, user

COUNTERS = ("vision_encoder_runs_total", "image_decodes_total", "vision_kv_writes_total")
A, B, C = (picture(seed) for seed in (1, 2, 3))
LONG = "Please look closely at every picture that I send and answer in a few words. " * 3


def conversations() -> dict[str, list[Any]]:
    """Ways to show picture A that differ in everything but A itself."""
    return {
        "first": [user(A, "What is in the image?")],
        "after other text": [user(LONG, A, "What is in the image?")],
        "beside others": [user(B, A, C, "Describe image 2.")],
        "at another position": [
            user("Hello, who are you?"),
            {"role": "assistant", "content": "I am a small model that can see."},
            user(C, "What is this?"),
            {"role": "assistant", "content": "A shape."},
            user(A, "And this?"),
        ],
        "twice": [user(A, A, "Are these two images the same?")],
        "under another system prompt": [
            {"role": "system", "content": "Answer briefly."},
            user(A, "What color is the shape?"),
        ],
    }


def replies(served: Served) -> dict[str, str]:
    client, model = served.client(), served.model()
    return {
        name: ask(client, model, messages, logprobs=True).choices[0].message.content
        for name, messages in conversations().items()
    }


def check() -> None:
    cold = {}
    for name, messages in conversations().items():
        with serving() as fresh:
            reply = ask(fresh.client(), fresh.model(), messages)
            cold[name] = reply.choices[0].message.content
    with serving() as warm:
        client, model = warm.client(), warm.model()
        ask(client, model, [user(C, B, A, "Three pictures.")])  # other order, other text
        before = {name: warm.metric(name) for name in COUNTERS}
        assert set(before.values()) == {3.0}, before
        assert replies(warm) == cold
        assert {name: warm.metric(name) for name in COUNTERS} == before
        usage = ask(client, model, [user("Well:", A, "Again?")]).usage
        assert usage.prompt_tokens_details.image_tokens <= usage.prompt_tokens_details.cached_tokens


if __name__ == "__main__":
    check()
    print("hit equals miss: every answer is the cold server's; nothing was computed again")

"""One stored conversation of many turns over HTTP, under a policy: what a turn costs as it grows.

A real server with its database, over the tests' tiny model. Every tenth turn shows a new picture.
Prints, by tenths of the conversation, a turn's median processor time (neighbours on the machine do
not count), what it computed and the process's memory.

Run: python tests/checks/long_session.py [--turns 2000] [--window 600]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import linear_regression, median
from typing import Any, NamedTuple, cast

import torch

sys.path.append(str(Path(__file__).parents[2]))

from mmserve.config import EngineConfig, ServerConfig
from mmserve.engine.async_engine import AsyncEngine
from mmserve.engine.engine import Engine
from tests.engine.tiny import tiny_config, tiny_model
from tests.server.conftest import Running, eventually, start
from tests.server.test_sessions_engine import picture

CONTEXT = 1600
NEW_PICTURE = 10  # turns


class Cost(NamedTuple):
    """Of one turn."""

    ms: float  # of processors
    computed: int  # tokens
    mib: float  # of the process


def memory() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def build(config: EngineConfig) -> Engine:
    return Engine(config, tiny_model(CONTEXT))


class Talk:
    """The conversation; each turn waits until what the one before left behind is done."""

    def __init__(self, running: Running, engine: AsyncEngine, window: int) -> None:
        self._http, self._running, self._engine = running.http(), running, engine
        self._parent: dict[str, Any] = {"session_policy": {"window": window, "images": 4}}

    def ask(self, *parts: dict[str, Any]) -> tuple[dict[str, Any], float]:
        content = [*parts, {"type": "input_text", "text": "And what of this? ".ljust(40)}]
        body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 24}
        services = self._running.services
        assert eventually(lambda: not (services.background or self._engine._generations))
        began = time.process_time()
        answer = self._http.post("/v1/responses", json={**body, **self._parent})
        took = time.process_time() - began
        assert answer.status_code == 200, answer.text
        response: dict[str, Any] = answer.json()
        self._parent = {"previous_response_id": response["id"]}
        return response, 1000 * took


def report(costs: list[Cost], response: dict[str, Any]) -> None:
    size = max(1, len(costs) // 10)
    for first in range(0, len(costs), size):
        part = costs[first : first + size]
        ms, computed = (median(c[i] for c in part) for i in (0, 1))
        print(f"turns {first:5}-: {ms:6.1f} ms, {computed:4.0f} tokens computed", end=", ")
        print(f"{part[-1].mib:6.0f} MiB")
    later = costs[len(costs) // 5 :]
    for name, i in (("ms", 0), ("MiB", 2)):
        slope = linear_regression(range(len(later)), [c[i] for c in later]).slope
        print(f"slope of the last four fifths: {1000 * slope:+.3f} {name} in 1,000 turns")
    print("session:", {k: v for k, v in response["session"].items() if k != "policy"})


def check(turns: int, window: int) -> list[Cost]:
    """Hold the conversation, print its costs, and return them."""
    torch.set_num_threads(1)
    engine = AsyncEngine(tiny_config(text_pages=400, vision_pages=800), build)
    with tempfile.TemporaryDirectory() as folder:
        config = ServerConfig(port=0, data_dir=Path(folder), max_stored_responses=200)
        running, stop = start(config, cast(Any, engine))
        assert eventually(lambda: engine.status == "ok")
        talk, costs = Talk(running, engine, window), []
        for i in range(turns):
            part = {"type": "input_image", "image_url": picture(i)}
            response, ms = talk.ask(*([part] if i % NEW_PICTURE == 2 else []))
            details = response["usage"]["input_tokens_details"]
            costs.append(Cost(ms, details["cache_write_tokens"], memory()))
        report(costs, response)
        stop()
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument("--window", type=int, default=600)
    arguments = parser.parse_args()
    check(arguments.turns, arguments.window)


if __name__ == "__main__":
    main()

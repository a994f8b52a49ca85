"""First tokens through the server: known and new images on a shape with random weights.

Run: python tests/checks/server_ttft.py [--shape idefics2-8b] [--device cuda] [--json FILE]

The server is a process of its own, started here on a free port; the client is the standard
library's, over one kept connection, with the images in every request as a browser sends them.
"""

from __future__ import annotations

import argparse
import base64
import functools
import http.client
import json
import multiprocessing
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

import torch

from mmserve.bench.ceilings import Probe, measure_ceilings, usual_dtype
from mmserve.bench.dims import SHAPES, ModelShape
from mmserve.bench.machine import facts
from mmserve.bench.pictures import draw
from mmserve.bench.shapes import build_shape
from mmserve.bench.stats import percentile
from mmserve.bench.suite import Case, Line, SuiteReport, record, render, run_cases
from mmserve.config import (
    GIB,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
)
from mmserve.engine.async_engine import AsyncEngine
from mmserve.engine.engine import Engine
from mmserve.server.runner import listen, serve

VIEW, QUESTION = 5, 32  # images; letters, each a token of the shapes' tokenizer
START_S = 180.0


def run_server(shape: ModelShape, device: str, port: int, pool_bytes: int) -> None:
    """Serve until the process is ended."""
    dtype = usual_dtype(torch.device(device))

    def build(config: EngineConfig) -> Engine:
        return Engine(config, build_shape(shape, torch.device(device), dtype))

    config = EngineConfig(
        ModelConfig(model=shape.name, device=device, dtype=str(dtype).removeprefix("torch.")),
        CacheConfig(text_bytes=pool_bytes, vision_bytes=pool_bytes),
        SchedulerConfig(max_num_batched_tokens=8192),
    )
    serve(ServerConfig(port=port), AsyncEngine(config, build))


@contextmanager
def serving(shape: ModelShape, device: str, pool_bytes: int) -> Iterator[int]:
    """The port of a server that is ready."""
    with listen(ServerConfig(port=0)) as probe:
        port = probe.getsockname()[1]
    arguments = (shape, device, port, pool_bytes)
    process = multiprocessing.get_context("spawn").Process(target=run_server, args=arguments)
    process.start()
    try:
        deadline = time.monotonic() + START_S
        while not ready(port):
            if not process.is_alive() or time.monotonic() > deadline:
                raise RuntimeError("the server did not start")
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.join(20)
        if process.is_alive():
            process.kill()


def ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


class Client:
    """Asks about pictures and times the first piece of an answer."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self._connection.request("GET", "/v1/models")
        self._model = json.loads(self._connection.getresponse().read())["data"][0]["id"]
        self._random = random.Random(1)
        self._drawn = 0

    def pictures(self, count: int) -> list[dict[str, Any]]:
        """New ones, as parts of a message."""
        self._drawn += count
        urls = [_data_url(draw(f"ttft/{self._drawn - i}")) for i in range(count)]
        return [{"type": "image_url", "image_url": {"url": url}} for url in urls]

    def ask(self, parts: Sequence[dict[str, Any]], text_first: bool = False) -> float:
        """Seconds from the request's first byte to the first text of its answer."""
        said = [{"type": "text", "text": self._words()}]
        content = [*said, *parts, *said] if text_first else [*parts, *said]
        body = json.dumps(
            {
                "model": self._model,
                "messages": [{"role": "user", "content": content}],
                "temperature": 0,
                "max_tokens": 8,
                "stream": True,
            }
        )
        started = time.perf_counter()
        head = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/chat/completions", body, head)
        response = self._connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {response.read(300)!r}")
        first: float | None = None
        while line := response.readline():
            if first is None and _has_text(line):
                first = time.perf_counter() - started
        if first is None:
            raise RuntimeError("an answer without text")
        return first

    def _words(self) -> str:
        letters = (self._random.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(QUESTION))
        return "".join(letters)


def _data_url(data: bytes) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(data).decode()


def _has_text(line: bytes) -> bool:
    if not line.startswith(b"data: {"):
        return False
    choices = json.loads(line[6:])["choices"]
    return bool(choices and choices[0]["delta"].get("content"))


class Kinds:
    """The cases: p50 of `repeats` requests, one at a time, after two that warm up."""

    def __init__(self, client: Client, repeats: int) -> None:
        self._client = client
        self._repeats = repeats
        self._window = client.pictures(VIEW)
        self._cold: float | None = None  # seconds

    def all(self) -> list[Case]:
        ask, window = self._client.ask, self._window
        name = "server TTFT"
        kinds: dict[str, Callable[[], float]] = {
            f"{name} {QUESTION} text tokens": lambda: ask([]),
            f"{name} {VIEW} new images": lambda: ask(self._client.pictures(VIEW)),
            f"{name} {VIEW} known images": lambda: ask(window),
            f"{name} {VIEW} known images behind other text": lambda: ask(window, True),
            f"{name} window of {VIEW}, 1 new": self._slide,
        }
        return [
            Case(kind, functools.partial(self._run, kind, once)) for kind, once in kinds.items()
        ]

    def _slide(self) -> float:
        self._window[:] = [*self._window[1:], *self._client.pictures(1)]
        return self._client.ask(self._window)

    def _run(self, kind: str, once: Callable[[], float]) -> list[Line]:
        self._client.ask(self._window)  # known again, whatever the new ones pushed out
        times = [once() for _ in range(self._repeats + 2)][2:]
        median = statistics.median(times)
        figures = {"ms p90": 1e3 * percentile(times, 0.9)}
        if "new images" in kind:
            self._cold = median
        elif "known" in kind and self._cold is not None:
            figures["x sooner than new"] = self._cold / median
        return [Line(kind, 1e3 * median, "ms", None, figures)]


@dataclass(frozen=True)
class Check:
    shape: ModelShape
    device: str
    budget_s: float
    repeats: int = 20
    pool_bytes: int = 4 * GIB
    probe: Probe | None = None


def check(asked: Check, path: Path | None) -> SuiteReport:
    device = torch.device(asked.device)
    ceilings = measure_ceilings(device, usual_dtype(device), asked.probe)
    command = shlex.join(["python", *sys.argv])
    name = f"{asked.shape.name} (random weights)"
    report = SuiteReport(command, "server", name, facts(device), ceilings, {}, ())
    with serving(asked.shape, asked.device, asked.pool_bytes) as port:
        deadline = time.monotonic() + asked.budget_s
        return record(report, run_cases(Kinds(Client(port), asked.repeats).all(), deadline), path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=tuple(SHAPES), default="idefics2-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--budget-seconds", type=float, default=120.0)
    args = parser.parse_args(argv)
    asked = Check(SHAPES[args.shape], args.device, args.budget_seconds)
    print(render(check(asked, args.json)))


if __name__ == "__main__":
    main()

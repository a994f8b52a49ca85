"""A server with stage workers against one without, both on this machine, turn by turn.

Run: python tests/checks/stages.py [--rounds 30] [--clients 1 4] [FLAG …]

Both serve the default model (or what the FLAGs name) at once; each round asks each of them the same
kind of question, in changing order: text alone, and one picture that it has not seen. One client
must be as quick with workers as without, within 3 %; with several the workers may be asked, and the
figures say what that gave. Medians of seconds to a first token and to the
end, and of the ratio of two requests that were asked one after the other.
"""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[2]))

import httpx

from tests.checks.served import Served, picture, serving

WITHIN = 1.03  # of one client's time without workers
TOKENS = 24  # of an answer
READY_S = 300.0
STAGES = ("encode", "prefill")


class Took(NamedTuple):
    first: float
    whole: float


def ask(http: httpx.Client, served: Served, number: int, images: int) -> Took:
    """Seconds of one streamed answer."""
    text = f"Question {number}. " + "Look closely, and say what you can see. " * 12
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    for i in range(images):
        data = base64.b64encode(picture(1000 * number + i)).decode()
        url = {"url": f"data:image/png;base64,{data}"}
        parts.append({"type": "image_url", "image_url": url})
    body = {
        "model": served.model(),
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    started, first = time.perf_counter(), None
    with http.stream("POST", f"{served.url}/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                if first is None and choices and choices[0]["delta"].get("content"):
                    first = time.perf_counter() - started
    assert first is not None, "there was no answer"
    return Took(first, time.perf_counter() - started)


def rounds(pair: Sequence[Served], count: int, images: int, clients: int) -> list[list[Took]]:
    """By server: what each request took; the servers take turns."""
    took: list[list[Took]] = [[] for _ in pair]
    with httpx.Client(timeout=600) as http, ThreadPoolExecutor(clients) as pool:
        for n in range(-2, count):  # the first ones also find their way
            for side in (0, 1) if n % 2 else (1, 0):
                first = (n + 2) * clients + (100_000 if images else 0)
                jobs = [
                    pool.submit(ask, http, pair[side], first + c, images) for c in range(clients)
                ]
                found = [job.result() for job in jobs]
                took[side] += found if n >= 0 else []
    return took


def wait_for_workers(served: Served) -> None:
    until = time.monotonic() + READY_S
    while True:
        stages = httpx.get(f"{served.url}/health").json()["stages"]
        if all(stages[kind]["connected"] == stages[kind]["workers"] for kind in STAGES):
            return
        assert time.monotonic() < until, "the workers did not start"
        time.sleep(0.2)


def check(count: int, clients: Sequence[int], flags: Sequence[str]) -> bool:
    """Prints a table; whether one client is as quick as without workers."""
    fine = True
    flags = ["--host-memory-limit", "0", *flags]  # four processes may be much for a small machine
    workers = ["--stages", ",".join(f"{kind}=1" for kind in STAGES)]
    with serving(*flags) as one, serving(*flags, *workers) as three:
        wait_for_workers(three)
        print("| clients | images | s to a first token: 1 | 3 | x | to the end: 1 | 3 | x |")
        print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
        for at_once in clients:
            for images in (0, 1):
                alone, staged = rounds((one, three), count, images, at_once)
                cells = []
                for pick in ("first", "whole"):
                    halves = [[getattr(took, pick) for took in side] for side in (alone, staged)]
                    # Of pairs that were asked one after the other: what else runs here changes.
                    ratio = statistics.median(b / a for a, b in zip(*halves, strict=True))
                    cells += [f"{x:.3f}" for x in (*map(statistics.median, halves), ratio)]
                    fine &= at_once > 1 or ratio <= WITHIN
                print(f"| {at_once} | {images} | " + " | ".join(cells) + " |", flush=True)
        text = httpx.get(f"{three.url}/metrics").text
        print(*(line for line in text.splitlines() if line.startswith("mmserve:stage")), sep="\n")
    return fine


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4])
    args, flags = parser.parse_known_args(argv)
    return 0 if check(args.rounds, args.clients, flags) else 1


if __name__ == "__main__":
    sys.exit(main())

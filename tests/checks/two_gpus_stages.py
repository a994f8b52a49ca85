"""Two GPUs of one host: prefill on one and decode on the other, against both as replicas.

Run: python tests/checks/two_gpus_stages.py --out DIR [--seconds 440] [--device cuda]

idefics2-8b's shape with random weights; prompts of 512 tokens and 0, 1, 4 or 10 new images, answers
of 128 tokens, arriving at random (Poisson). Goodput is the highest rate at which 90 % of requests
have their first token within 500 ms and, on the mean, 50 ms between two. `staged`: one server on
GPU 0 that may ask a prefill worker on GPU 1, which encodes, too; `replicas`: a server on each, half
of the requests to each. All four processes stay loaded; while one side is measured the other has
nothing to do. Each side's rate is searched in turns, window by window, until time is up. DIR gets
`two_gpus_stages.json` and `.md`. With --device cpu a tiny shape shows that the script runs.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[2]))

import numpy as np
import torch

from mmserve.bench.dims import SHAPES, ModelShape, TextDims, TowerDims
from mmserve.bench.machine import facts
from mmserve.bench.shapes import build_shape
from mmserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpecConfig
from mmserve.engine.async_engine import AsyncEngine
from mmserve.engine.engine import Engine
from mmserve.model.loader import resolve_device
from mmserve.prompt import Prompt
from mmserve.request import ImageInput, ImageSegment, SamplingParams, Segment, TextSegment
from mmserve.stages.workers import Place, StageWorkers
from mmserve.vision.preprocess import fingerprint

IMAGES = (0, 1, 4, 10)
FIRST_S, BETWEEN_S, SHARE = 0.5, 0.05, 0.9
START_S = 240.0
TOWER = TowerDims("siglip", 1, 64, 1, 64, patch=14, image_size=56, latent_grid=(2, 2))
SMALL = ModelShape("small", TextDims("llama", 2, 64, 4, 2, 16, 128, 512, 1e4), TOWER)
TARGETS = {4: 1.5}
LEAST = 0.97
GUESS = {0: 40.0, 1: 30.0, 4: 14.0, 10: 6.0}  # requests a second that a search begins with


@dataclass(frozen=True)
class Traffic:
    text: int = 512
    answer: int = 128
    window_s: float = 5.0


class Took(NamedTuple):
    first: float
    between: float  # on the mean


class Order(NamedTuple):
    """A window of requests: so many images each, so many a second."""

    images: int
    rate: float
    seed: int


# -- a server's process -------------------------------------------------------------------------


def build(config: EngineConfig, kind: type[Engine] = Engine, *, shape: ModelShape) -> Engine:
    device = resolve_device(config.model.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return kind(config, build_shape(shape, device, dtype))


def engine_config(shape: ModelShape, device: str) -> EngineConfig:
    gib, threads = (1 << 30, None) if device == "cuda" else (1 << 24, 1)
    return EngineConfig(
        model=ModelConfig(model=shape.name, device=device, num_threads=threads),
        cache=CacheConfig(text_bytes=24 * gib, vision_bytes=8 * gib),
        scheduler=SchedulerConfig(max_num_seqs=128, max_num_batched_tokens=2048, max_waiting=4096),
        speculative=SpecConfig(method=None),
    )


def run_server(
    pipe: Any, shape: ModelShape, device: str, traffic: Traffic, staged: int | None
) -> None:
    """Measure what is ordered, until nothing more is. `staged`: the GPU of a prefill worker."""
    config, make = engine_config(shape, device), partial(build, shape=shape)
    with ExitStack() as stack:
        if staged is not None:
            gpu = staged if device == "cuda" else None
            workers = StageWorkers(config, make, [Place("prefill", device, gpu)])
            workers.start()
            stack.callback(workers.close)
            config = workers.config
        asyncio.run(serve_orders(pipe, AsyncEngine(config, make), traffic))


async def serve_orders(pipe: Any, engine: AsyncEngine, traffic: Traffic) -> None:
    await engine.start()
    while any(kind["connected"] < kind["workers"] for kind in engine.stages.values()):
        await asyncio.sleep(0.1)
    pipe.send(dataclasses.asdict(facts(engine.engine.runner.device)))
    while (order := await asyncio.to_thread(pipe.recv)) is not None:
        took = await measure(engine, order, traffic)
        said = {k: v for k, v in engine.metrics.values().items() if "stage_" in k}
        pipe.send((took, said))
    await engine.stop()


async def measure(engine: AsyncEngine, order: Order, traffic: Traffic) -> list[Took]:
    """Requests that come whether or not earlier ones have been answered."""
    rng = random.Random(repr(order))
    count = max(round(order.rate * traffic.window_s), 4)
    prompts = [make_prompt(engine.engine, order.images, traffic.text, rng) for _ in range(count)]
    params = SamplingParams(max_tokens=traffic.answer, temperature=0.0, ignore_eos=True)
    started, due, tasks = time.perf_counter(), 0.0, []
    for number, prompt in enumerate(prompts):
        await asyncio.sleep(max(started + due - time.perf_counter(), 0.0))
        name = f"{order.seed}-{order.images}-{order.rate:g}-{number}"
        tasks.append(asyncio.create_task(ask(engine, name, prompt, params)))
        due += rng.expovariate(order.rate)
    return list(await asyncio.gather(*tasks))


async def ask(engine: AsyncEngine, name: str, prompt: Prompt, params: SamplingParams) -> Took:
    started = time.perf_counter()
    times = []
    async for event in engine.submit(name, prompt, params):
        if event.error is not None:
            raise RuntimeError(event.error)
        times += [time.perf_counter()] * len(event.token_ids)
    return Took(times[0] - started, (times[-1] - times[0]) / max(len(times) - 1, 1))


def make_prompt(engine: Engine, images: int, text: int, rng: random.Random) -> Prompt:
    """Images stand first, none of them seen before."""
    pipeline: Any = engine.pipeline
    segments: list[Segment] = []
    for _ in range(images):
        digest = fingerprint(("noise", rng.randbytes(16)))
        noise = np.random.default_rng(rng.getrandbits(32))
        pixels = noise.integers(0, 256, (1, 3, pipeline.size, pipeline.size), dtype=np.uint8)
        count = pipeline.num_tokens["auto"]
        segments += [TextSegment((5,)), ImageSegment(ImageInput(digest, b"", count, pixels))]
    plain = range(min(1000, engine.vocab_size // 2), engine.vocab_size)
    segments.append(TextSegment(tuple(rng.choices(plain, k=text))))
    visual = sum(s.image.num_tokens for s in segments if isinstance(s, ImageSegment))
    return Prompt(tuple(segments), text + images, visual)


# -- all processes ------------------------------------------------------------------------------


class Side:
    """Servers that are measured together."""

    def __init__(self, name: str, pipes: Sequence[Any]) -> None:
        self.name, self._pipes = name, pipes
        self.said: dict[str, float] = {}

    def share(self, order: Order) -> float:
        """Of the requests of a window, those that were answered in time."""
        each = order._replace(rate=order.rate / len(self._pipes))
        for number, pipe in enumerate(self._pipes):
            pipe.send(each._replace(seed=2 * order.seed + number))
        took: list[Took] = []
        for pipe in self._pipes:
            found, self.said = pipe.recv()
            took += found
        good = [t.first <= FIRST_S and t.between <= BETWEEN_S for t in took]
        firsts, between = ([getattr(t, n) for t in took] for n in ("first", "between"))
        print(
            f"{self.name}: {order.images} images at {order.rate:.2f}/s: "
            f"{statistics.mean(good):.3f} in time; first {1e3 * statistics.median(firsts):.0f} ms, "
            f"between {1e3 * statistics.median(between):.1f} ms",
            flush=True,
        )
        return statistics.mean(good)


@dataclass
class Search:
    """The highest rate that a side keeps up with: up or down by half, then between."""

    rate: float
    low: float = 0.0
    high: float = float("inf")

    def note(self, share: float) -> None:
        if share >= SHARE:
            self.low = max(self.low, self.rate)
        else:
            self.high = min(self.high, self.rate)
        if self.high == float("inf"):
            self.rate = self.low * 1.5
        elif not self.low:
            self.rate = self.high / 1.5
        else:
            self.rate = (self.low + self.high) / 2


@contextmanager
def sides(shape: ModelShape, device: str, traffic: Traffic) -> Iterator[tuple[list[Side], Any]]:
    """Both, ready; and what their first process says of the machine."""
    context = multiprocessing.get_context("spawn")
    servers: list[tuple[Any, Any]] = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    for gpus, staged in ((visible, 1), (visible[:1], None), (visible[1:2], None)):
        mine, its = context.Pipe()
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)  # of the process started next
        arguments = (its, shape, device, traffic, staged)
        process = context.Process(target=run_server, args=arguments)
        process.start()
        its.close()
        servers.append((process, mine))
    pipes = [pipe for _, pipe in servers]
    try:
        if not all(pipe.poll(START_S) for pipe in pipes):
            raise TimeoutError("a server did not start")
        told = [pipe.recv() for pipe in pipes]
        yield [Side("staged", pipes[:1]), Side("replicas", pipes[1:])], told[0]
    finally:
        for process, pipe in servers:
            with suppress(OSError):
                pipe.send(None)
            process.join(15)
            if process.is_alive():
                process.kill()


def run(args: argparse.Namespace) -> str:
    ends = time.monotonic() + args.seconds
    shape = SHAPES["idefics2-8b"] if args.device == "cuda" else SMALL
    traffic = Traffic() if args.device == "cuda" else Traffic(text=200, answer=8, window_s=2.0)
    found: dict[str, dict[int, float]] = {"staged": {}, "replicas": {}}
    report: dict[str, Any] = {"shape": shape.name, "traffic": dataclasses.asdict(traffic)}
    page = ""
    with sides(shape, args.device, traffic) as (both, told):
        for images in IMAGES:  # compiling, first measurements of what prompts cost
            for side in both:
                side.share(Order(images, GUESS[images] / 2, 99))
        for left, images in zip(range(len(IMAGES), 0, -1), IMAGES, strict=True):
            until = time.monotonic() + (ends - time.monotonic()) / left
            searches = {side.name: Search(GUESS[images]) for side in both}
            seed = 0
            while time.monotonic() + 2.5 * len(both) * traffic.window_s / 2 < until or not seed:
                seed += 1
                for side in both:
                    search = searches[side.name]
                    search.note(side.share(Order(images, search.rate, seed)))
            for side in both:
                found[side.name][images] = searches[side.name].low
            report |= {"goodput": found, "facts": told, "metrics": both[0].said}
            (args.out / "two_gpus_stages.json").write_text(json.dumps(report, indent=1))
            page = table(found, told)
            (args.out / "two_gpus_stages.md").write_text(page)
    return page


def table(found: dict[str, dict[int, float]], told: dict[str, Any]) -> str:
    lines = ["| images | replicas, requests/s | staged, requests/s | x | wanted |"]
    lines.append("| ---: | ---: | ---: | ---: | --- |")
    for images, alone in found["replicas"].items():
        staged = found["staged"].get(images, 0.0)
        ratio = f"{staged / alone:.2f}" if alone else ""
        wanted = TARGETS.get(images, LEAST)
        lines.append(f"| {images} | {alone:.2f} | {staged:.2f} | {ratio} | >= {wanted} |")
    said = f"Commit {told['commit']}, {told['device']}, torch {told['torch']}."
    return "\n".join([*lines, "", said]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=440.0)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    print(run(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())

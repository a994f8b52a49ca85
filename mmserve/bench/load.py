"""Requests of random tokens and noise images, given to an engine in the caller's own thread.

Owns what is asked and the clock around it: no server, no tokenizer and no image decoder is timed.
Knows nothing of ceilings or tables.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mmserve.bench.ceilings import synchronize
from mmserve.energy import Reader
from mmserve.engine.engine import Engine
from mmserve.request import (
    FinishReason,
    ImageInput,
    ImageSegment,
    Request,
    SamplingParams,
    Segment,
    TextSegment,
)
from mmserve.vision.preprocess import fingerprint

_EDGE_S = 0.5  # a board's counter moves at least so often
_NOISE_IMAGES = 8  # made once: what differs between images is their digest


@dataclass(frozen=True)
class Window:
    """How long is measured, whichever ends first after `min_steps`."""

    seconds: float = 1.0
    max_steps: int = 300
    min_steps: int = 3
    warm_up: int = 8  # steps before

    def open(self, started: float, steps: int) -> bool:
        late = time.perf_counter() - started >= self.seconds
        return steps < self.min_steps or (steps < self.max_steps and not late)


@dataclass
class Load:
    """One engine under load. `deadline` in seconds of `time.monotonic` ends whatever runs."""

    engine: Engine
    read_joules: Reader | None = None
    seed: int = 0
    deadline: float = float("inf")
    answers: dict[str, list[int]] = field(default_factory=dict)  # of requests that run, by id

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._names = itertools.count()
        self.device = self.engine.runner.device
        vocab = self.engine.tokenizer.vocab_size
        self._plain = range(min(1000, vocab // 2), vocab)  # special tokens have low ids

    @cached_property
    def _noise(self) -> npt.NDArray[np.uint8]:
        """[images, 1, 3, H, W] of a native model, each in one piece."""
        pipeline: Any = self.engine.pipeline
        shape = (_NOISE_IMAGES, 1, 3, pipeline.size, pipeline.size)
        return np.random.default_rng(self.seed).integers(0, 256, shape, dtype=np.uint8)

    def text(self, count: int) -> TextSegment:
        return TextSegment(tuple(self._rng.choices(self._plain, k=count)))

    def image(self) -> ImageSegment:
        """A new one: noise, already decoded."""
        number = next(self._names)
        digest = fingerprint(("noise", f"{self.seed}/{number}".encode()))
        pixels = self._noise[number % _NOISE_IMAGES]
        pipeline: Any = self.engine.pipeline
        return ImageSegment(ImageInput(digest, b"", pipeline.num_tokens["auto"], pixels))

    def images(self, count: int) -> list[Segment]:
        return [self.image() for _ in range(count)]

    def add(self, segments: Sequence[Segment], max_tokens: int | None = None) -> str:
        """Queue a greedy request. Raises ContextLengthExceededError where it can never fit."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request = Request(f"load-{next(self._names)}", tuple(segments), params)
        text = _text_tokens(segments)
        images = sum(image.num_tokens for image in request.images)
        self.engine.scheduler.check_admissible(request, text, images)
        self.engine.add(request)
        self.answers[request.id] = []
        return request.id

    def step(self) -> int:
        """One engine step; how many tokens came. Raises TimeoutError and RuntimeError."""
        if time.monotonic() > self.deadline:
            raise TimeoutError("no time left")
        count = 0
        for name, event in self.engine.step():
            if event.error is not None:
                raise RuntimeError(event.error)
            count += len(event.token_ids)
            self.answers[name] += event.token_ids
            if event.finish_reason is not None:
                del self.answers[name]
        return count

    def ask(self, segments: Sequence[Segment]) -> float:
        """Seconds from a request's arrival to its first token, with nothing else running."""
        synchronize(self.device)
        started = time.perf_counter()
        self.add(segments, max_tokens=1)
        while not self.step():
            pass
        seconds = time.perf_counter() - started
        while self.engine.has_work:
            self.step()
        return seconds

    def start_decoding(self, prompts: Sequence[Sequence[Segment]], grown: int) -> None:
        """Queue all and step until each has its first token; each may grow by `grown` tokens.

        Raises ValueError where they do not run all together.
        """
        holdings, size = self.engine.scheduler.holdings, self.engine.scheduler.page_size
        need = sum(-(-(_text_tokens(prompt) + grown) // size) for prompt in prompts)
        for g in holdings.text_groups:
            if holdings.groups[g].window is None and need > holdings.text[g].num_pages:
                gigabytes = need * self.engine.runner.text[g].shape.page_bytes / 1e9
                raise ValueError(f"does not fit: needs {gigabytes:.0f} GB of text KV")
        for prompt in prompts:
            self.add(prompt)
        while not all(self.answers.values()):
            if max(map(len, self.answers.values())) > grown:
                raise ValueError(
                    f"not all begin before the first has {grown} tokens: steps are small"
                )
            self.step()
        self.check_running(len(prompts))

    def check_running(self, count: int) -> None:
        running = len(self.engine.scheduler.running)
        if running != count:
            raise ValueError(f"only {running} of {count} sequences fit side by side")

    def time_steps(self, window: Window) -> tuple[float, int, int]:
        """Seconds, steps and tokens of a window over whatever is decoding."""
        for _ in range(window.warm_up):
            self.step()
        synchronize(self.device)
        steps = tokens = 0
        started = time.perf_counter()
        while window.open(started, steps):
            tokens += self.step()
            steps += 1
        synchronize(self.device)
        return time.perf_counter() - started, steps, tokens

    def joules_each(self, work: Callable[[], int], window: Window) -> float | None:
        """Board joules of one of the units that `work` does; None without a counter.

        From one movement of the counter to another, so its step costs no accuracy.
        """
        read = self.read_joules
        if read is None:
            return None
        first, _ = self._until_it_moves(read, work)
        steps = units = 0
        started = time.perf_counter()
        while window.open(started, steps):
            units += work()
            steps += 1
        last, more = self._until_it_moves(read, work)
        return (last - first) / (units + more)

    def _until_it_moves(self, read: Reader, work: Callable[[], int]) -> tuple[float, int]:
        before, units = read(), 0
        until = time.perf_counter() + _EDGE_S
        while time.perf_counter() < until:
            units += work()
            now = read()
            if now != before:
                return now, units
        return before, units

    def clear(self) -> None:
        """End everything and forget cached text, so that a case finds what the first one found."""
        self.engine.abort_all(FinishReason.ABORT)
        while self.engine.has_work:
            self.engine.step()
        self.answers.clear()
        radix = self.engine.scheduler.radix
        if radix is not None:
            radix.clear()


def _text_tokens(segments: Sequence[Segment]) -> int:
    return sum(len(s.token_ids) for s in segments if isinstance(s, TextSegment))


def kv_bytes(load: Load) -> tuple[int, int]:
    """Bytes of KV that a decode step must read: each page once, and once for each sequence."""
    runner, running = load.engine.runner, load.engine.scheduler.running
    once = each = 0
    for g in range(len(runner.groups)):
        text = [page for seq in running for page in seq.tables[g] if page >= 0]
        vision = [page for seq in running for i in seq.images for page in (i.pages or [])[g]]
        for pages, pool in ((text, runner.text[g]), (vision, runner.vision[g])):
            once += len(set(pages)) * pool.shape.page_bytes
            each += len(pages) * pool.shape.page_bytes
    return once, each

"""One session without end: a million text tokens and a thousand images through one engine.

Turns are chained as a server chains them: each prompt is the one before, its answer and what is
new. Where a turn leaves more text than the window, whole oldest turns are left out down to half of
it, and what stays is computed behind the turn, not before the next one's answer. Some answers
outgrow the window by themselves. An image of an early turn is pinned, and asked about at the end.

What else runs on a machine changes the time per token, so a second engine that says the same few
words all the time is timed beside the session, and the session's pace is told in that one's.

Run: python tests/checks/endless.py [--turns 2000] [--model tiny|smolvision-135m]
"""

from __future__ import annotations

import argparse
import itertools
import random
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression, mean, median, stdev
from typing import NamedTuple

import numba
import torch

sys.path.append(str(Path(__file__).parents[2]))

from mmserve.config import CacheConfig, EngineConfig, ModelConfig
from mmserve.engine.build_engine import build_engine
from mmserve.engine.engine import Engine
from mmserve.request import (
    ImageSegment,
    Request,
    SamplingParams,
    Segment,
    Streaming,
    TextSegment,
    Usage,
)
from tests.engine.driver import picture
from tests.engine.tiny import tiny_config, tiny_model

WINDOW = 1024  # text tokens at a turn's border
IN_TURN = 1536  # text tokens inside one
LAST_IMAGES = 8
PINNED = 3  # the turn whose image is pinned
WORDS, ANSWER, LONG_ANSWER, LONG_EVERY = 480, 12, IN_TURN, 200
PAGE_KB = resource.getpagesize() // 1024


class Pace(NamedTuple):
    """Milliseconds between two tokens, the median: of a clock, and of processors."""

    wall: float
    cpu: float

    @classmethod
    def of(cls, times: list[tuple[float, float]]) -> Pace:
        if len(times) < 2:
            return cls(0.0, 0.0)
        gaps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(times)]
        return cls(*(1e3 * median(gap) for gap in zip(*gaps, strict=True)))


@dataclass
class Turn:
    segments: tuple[Segment, ...]

    @property
    def text(self) -> int:
        return sum(len(s.token_ids) for s in self.segments if isinstance(s, TextSegment))

    @property
    def images(self) -> list[ImageSegment]:
        return [s for s in self.segments if isinstance(s, ImageSegment)]


@dataclass
class Session:
    engine: Engine
    head: TextSegment
    turns: list[Turn] = field(default_factory=list)
    kept: list[ImageSegment] = field(default_factory=list)  # of turns that are left out
    pinned: ImageSegment | None = None
    text_tokens: int = 0
    images: int = 0
    cuts: int = 0
    dropped_inside: int = 0
    ids: itertools.count[int] = field(default_factory=itertools.count)

    def say(self, segments: tuple[Segment, ...], limit: int) -> Pace:
        """A turn; what was between its tokens."""
        new = Turn(segments)
        tokens, gaps, usage = self.run(self.prompt(new), limit)
        self.dropped_inside += usage.dropped_tokens
        self.text_tokens += new.text + len(tokens)
        self.images += len(new.images)
        # Of an answer that outgrew its window, only what was still read when it ended.
        said = TextSegment(tuple(tokens[-WINDOW // 2 :]))
        self.turns.append(Turn((*segments, said)))
        if sum(turn.text for turn in self.turns) > WINDOW:
            self.cut()
        return gaps

    def prompt(self, *more: Turn) -> tuple[Segment, ...]:
        turns = [s for turn in (*self.turns, *more) for s in turn.segments]
        return (self.head, *self.kept, *turns)

    def cut(self) -> None:
        """Whole turns go, and the new layout is computed at once."""
        self.cuts += 1
        while len(self.turns) > 1 and sum(turn.text for turn in self.turns) > WINDOW // 2:
            self.kept += self.turns.pop(0).images
        shown = sum(len(turn.images) for turn in self.turns)
        pinned = [image for image in self.kept if image is self.pinned]
        others = [image for image in self.kept if image is not self.pinned]
        self.kept = pinned + others[len(others) - max(LAST_IMAGES - shown, 0) :]
        self.run(self.prompt(), 1, prefill_only=True)

    def run(
        self, segments: tuple[Segment, ...], limit: int, *, prefill_only: bool = False
    ) -> tuple[list[int], Pace, Usage]:
        """Tokens, what was between them, and the usage."""
        params = SamplingParams(max_tokens=limit, temperature=0.0, ignore_eos=True)
        digests = frozenset(s.image.digest for s in segments if isinstance(s, ImageSegment))
        streaming = Streaming(IN_TURN, len(self.head.token_ids), WINDOW // 2, digests)
        request = Request(str(next(self.ids)), segments, params, prefill_only, streaming=streaming)
        text = sum(len(s.token_ids) for s in segments if isinstance(s, TextSegment))
        visual = sum(image.num_tokens for image in request.images)
        self.engine.scheduler.check_admissible(request, text, visual)
        self.engine.add(request)
        tokens: list[int] = []
        times: list[tuple[float, float]] = []
        while True:
            for _, event in self.engine.step():
                tokens += event.token_ids
                times += [(time.perf_counter(), time.process_time())] * len(event.token_ids)
                if event.finish_reason is not None:
                    assert event.usage is not None and event.error is None, event.error
                    return tokens, Pace.of(times), event.usage


def build(name: str) -> Engine:
    if name != "tiny":
        cache = CacheConfig(text_bytes=256 << 20, vision_bytes=64 << 20)
        return build_engine(EngineConfig(model=ModelConfig(model=name), cache=cache))
    # Pages for a few windows and three dozen images: what is left behind has to make room.
    return Engine(tiny_config(text_pages=400, vision_pages=72), tiny_model(max_model_len=4096))


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * PAGE_KB / 1024


def encoder_runs(engine: Engine) -> float:
    return float(engine.metrics.vision_encoder_runs._value.get())


def pages_in_use(engine: Engine) -> str:
    text, vision = engine.scheduler.text[0], engine.scheduler.vision[0]
    used = text.num_pages - text.num_free
    return f"{used}/{text.num_pages} text, {vision.num_used}/{vision.num_pages} vision"


def check(turns: int, name: str) -> None:
    rng = random.Random(5)
    engine = build(name)
    vocabulary = range(300, 20_000) if name != "tiny" else range(3, 259)
    session = Session(engine, TextSegment(tuple(rng.choices(vocabulary, k=16))))

    def words(count: int) -> TextSegment:
        return TextSegment(tuple(rng.choices(vocabulary, k=count)))

    def image(seed: int) -> ImageSegment:
        return ImageSegment(engine.pipeline.prepare(picture(seed, 8 if name == "tiny" else 64)))

    question = words(12)
    first: list[int] = []
    pace: list[Pace] = []  # by turn
    beside: list[float] = []  # the session's processor time per token in a fresh engine's
    fresh = Session(build(name), session.head)
    pictures = map(image, range(turns, turns + LAST_IMAGES))
    prompt: tuple[Segment, ...] = (fresh.head, *pictures, words(1000))
    memory: list[float] = []
    started = time.perf_counter()
    print("turn    tokens images  MiB resident  ms per token  of processors  pages in use")
    for number in range(turns):
        shown = (image(number), words(WORDS // 2)) if number % 2 else ()
        long = number % LONG_EVERY == LONG_EVERY - 1
        parts = (words(WORDS - (WORDS // 2 if shown else 0)), *shown)
        pace.append(session.say(parts, LONG_ANSWER if long else ANSWER))
        if number == PINNED:
            session.pinned = session.turns[-1].images[-1]
            first = session.run((session.head, session.pinned, question), ANSWER)[0]
        if number % 5 == 0:
            beside.append(pace[-1].cpu / fresh.run(prompt, ANSWER)[1].cpu)
        memory.append(resident_mb())
        if (number + 1) % max(turns // 10, 1) == 0:
            tenth = pace[-max(turns // 10, 1) :]
            print(
                f"{number + 1:5d} {session.text_tokens:9,d} {session.images:6d} "
                f"{memory[-1]:13.1f} {median(p.wall for p in tenth):13.3f} "
                f"{median(p.cpu for p in tenth):14.3f}  {pages_in_use(engine)}",
                flush=True,
            )
    took = time.perf_counter() - started
    assert session.pinned is not None
    before = encoder_runs(engine)
    again = session.run((session.head, session.pinned, question), ANSWER)[0]
    session.say((words(5), session.pinned, question), ANSWER)
    assert again == first, "the early image is answered unlike before"
    assert encoder_runs(engine) == before == session.images - 1, "an image was looked at twice"
    print(
        f"{took:.0f} s; {session.cuts} cuts at turns' borders, {session.dropped_inside:,} tokens "
        f"dropped inside turns; the image of turn {PINNED} was asked again with no encoder run"
    )
    print_slopes(
        {
            "ms per token": [p.wall for p in pace],
            "of processors": [p.cpu for p in pace],
            "in a fresh engine's": beside[1:],
            "MiB resident": memory,
        }
    )


def print_slopes(by_turn: dict[str, list[float]]) -> None:
    """The mean, and how much it changes, behind the first tenth, which is warming up."""
    for label, values in by_turn.items():
        rest = values[len(values) // 10 :]
        turns = range(len(rest))
        slope, start = linear_regression(turns, rest)
        errors = [y - start - slope * x for x, y in zip(turns, rest, strict=True)]
        sure = 2 * len(rest) ** 0.5 * stdev(errors) / stdev(turns)  # two standard errors
        change = slope * len(rest)
        print(f"{label}: {mean(rest):.3f}, over the session {change:+.3f} (+- {sure:.3f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument("--model", default="tiny")
    arguments = parser.parse_args()
    if arguments.model == "tiny":  # threads would wait for each other longer than they compute
        torch.set_num_threads(1)
        numba.set_num_threads(1)
    check(arguments.turns, arguments.model)

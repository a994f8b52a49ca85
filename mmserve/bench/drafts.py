"""`mmserve bench drafts`: the same questions with drafts and without, in one run.

Owns the questions and their order. Knows nothing of how anything is guessed.

Figures are of decoding alone: the tokens behind each stream's first, over the time from the last
stream's first token to the end. What was asked once is asked again, because earlier answers are
what some drafters draw upon; without drafts, too, so that both have the same in their caches.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from mmserve.bench.ceilings import Probe, measure_ceilings
from mmserve.bench.chat import asked, chat
from mmserve.bench.machine import facts
from mmserve.bench.pictures import draw
from mmserve.bench.suite import Line, SuiteReport, record, render
from mmserve.config import EngineConfig, SpecConfig
from mmserve.engine.engine import Engine
from mmserve.model.weights import load
from mmserve.request import Request, SamplingParams, Segment, TextSegment, Timings

QUESTIONS = (
    "Write a short story about a lighthouse keeper.",
    "Explain how rainbows form.",
    "What is the capital of France, and what is it known for?",
    "Give me a recipe for pancakes.",
    "List five tips for learning a language.",
    "Write a poem about the sea.",
    "Explain photosynthesis to a child.",
    "How do I make a cup of tea?",
)
LOOKS = ("Describe this image.", "What shapes are there?")
PICTURES = 4
LINES = 24  # of the document


@dataclass(frozen=True)
class DraftSuite:
    streams: tuple[int, ...] = (1, 4, 64)
    output_tokens: int = 128
    json: Path | None = None
    command: str = "mmserve bench drafts"
    probe: Probe | None = None


class _Found(NamedTuple):
    """Of one case: tokens a second, every answer, tokens guessed and right."""

    rate: float
    answers: list[tuple[int, ...]]
    drafted: int
    right: int


def bench_drafts(suite: DraftSuite, config: EngineConfig) -> SuiteReport:
    """Run with the configuration's drafter, and before that without one; print, write the JSON."""
    plain = dataclasses.replace(config, speculative=SpecConfig(method=None))
    without = dict(_Session(suite, plain).cases())
    gc.collect()  # one model at a time
    session = _Session(suite, config)
    drafting = session.engine.drafting
    if drafting is None:
        raise ValueError(f"nothing drafts for {session.engine.name}: see --speculative-config")
    device, dtype = session.engine.runner.device, session.engine.runner.adapter.dtype
    report = SuiteReport(
        command=suite.command,
        suite="drafts",
        model=f"{session.engine.name}, drafts by {drafting.drafter.name}",
        facts=facts(device),
        ceilings=measure_ceilings(device, dtype, suite.probe),
        sizes={"tokens of output": suite.output_tokens},
        lines=(),
    )
    lines = (_line(name, found, without[name]) for name, found in session.cases())
    report = record(report, lines, suite.json)
    session.engine.close()
    print(render(report))
    return report


def _line(name: str, found: _Found, plain: _Found) -> Line:
    pairs = zip(found.answers, plain.answers, strict=True)
    equal = sum(a == b for one, other in pairs for a, b in zip(one, other, strict=False))
    figures = {
        "x as fast": found.rate / plain.rate,
        "without": plain.rate,
        "drafted": float(found.drafted),
        "right": float(found.right),
        "% of tokens equal": 100 * equal / max(sum(map(len, plain.answers)), 1),
    }
    return Line(name, found.rate, "tokens/s", figures=figures)


class _Session:
    def __init__(self, suite: DraftSuite, config: EngineConfig) -> None:
        self._suite = suite
        self.engine = Engine(config, load(config.model))
        self._params = SamplingParams(max_tokens=suite.output_tokens, temperature=0.0)
        self._count = itertools.count()

    def cases(self) -> Iterator[tuple[str, _Found]]:
        for streams in self._suite.streams:
            self._warm_up(streams)
            for name, prompts in self._prompts(streams):
                yield f"{name}, {streams} streams", self._ask(prompts, streams)

    def _warm_up(self, streams: int) -> None:
        """What is captured or compiled at its first use is not what is measured."""
        self._ask([self._chat(f"{q} (first try {streams})") for q in QUESTIONS[:4]], streams)
        if streams > len(QUESTIONS):
            self._ask(self._many(streams, "first try"), streams)

    def _prompts(self, streams: int) -> Iterator[tuple[str, list[tuple[Segment, ...]]]]:
        if streams > len(QUESTIONS):
            yield "questions", self._many(streams, "question")
            return
        questions = [self._chat(f"{q} ({streams})") for q in QUESTIONS]
        yield "new questions", questions
        yield "the same again", questions
        if self.engine.least_image_tokens:
            shown = [draw(f"{streams} {n}") for n in range(PICTURES)]
            looks = [self._chat(text, picture) for picture in shown for text in LOOKS]
            yield "new pictures", looks
            yield "the same pictures again", looks
        yield "a document repeated", [self._copying(n) for n in range(4)]

    def _many(self, streams: int, kind: str) -> list[tuple[Segment, ...]]:
        rounds = -(-streams // len(QUESTIONS))
        every = (f"{q} ({kind} {n})" for n in range(rounds) for q in QUESTIONS)
        return [self._chat(text) for text in every]

    def _chat(self, text: str, picture: bytes | None = None) -> tuple[Segment, ...]:
        return chat(self.engine, [asked(text, picture)])

    def _copying(self, number: int) -> tuple[Segment, ...]:
        """A document twice, and how it begins for the third time."""
        lines = (
            f"Entry {i}: {i * 7919 % 1000} crates of apples from farm {i % 7}."
            for i in range(LINES)
        )
        tokens = self.engine.tokenizer.encode("\n".join(lines) + "\n")
        return (TextSegment((*tokens, *tokens, *tokens[: 40 + number])),)

    def _ask(self, prompts: Sequence[tuple[Segment, ...]], streams: int) -> _Found:
        answers: list[tuple[int, ...]] = []
        seconds, drafted, right = 0.0, 0, 0
        for first in range(0, len(prompts), streams):
            batch, took, timings = self._together(prompts[first : first + streams])
            answers += batch
            seconds += took
            drafted += sum(each.drafted for each in timings)
            right += sum(each.accepted for each in timings)
        tokens = sum(map(len, answers)) - len(answers)
        return _Found(tokens / seconds, answers, drafted, right)

    def _together(
        self, prompts: Sequence[tuple[Segment, ...]]
    ) -> tuple[list[tuple[int, ...]], float, list[Timings]]:
        engine = self.engine
        said: dict[str, list[int]] = {}
        for segments in prompts:
            request = Request(f"drafts-{next(self._count)}", segments, self._params)
            said[request.id] = []
            engine.add(request)
        begun: dict[str, float] = {}
        timings = []
        while engine.has_work:
            for name, event in engine.step():
                said[name] += event.token_ids
                if event.token_ids:
                    begun.setdefault(name, time.perf_counter())
                if event.timings is not None:
                    timings.append(event.timings)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        took = time.perf_counter() - max(begun.values())
        return [tuple(tokens) for tokens in said.values()], took, timings

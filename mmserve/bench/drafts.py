"""`mmserve bench drafts`: the same questions with drafts and without, in one run.

Owns the questions and their order. Knows nothing of how anything is guessed.

Pictures are a dozen shapes on noise, as hard as any; drawings are one to five on plain ground, like
those that a head was trained on, but others.

Figures are of decoding alone: the tokens behind each stream's first, over the time from the last
stream's first token to the end. What was asked once is asked again, because earlier answers are
what some drafters draw upon; without drafts, too, so that both have the same in their caches. A
machine's speed changes within a minute, so both sides answer each case in turn, several times over
with other words, and medians count.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
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
from mmserve.train_drafter.pictures import PICTURES, picture

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
LOOKED_AT = 4  # pictures
LINES = 24  # of the document


@dataclass(frozen=True)
class DraftSuite:
    streams: tuple[int, ...] = (1, 4, 64)
    output_tokens: int = 128
    repeats: int = 3
    only: tuple[str, ...] = ()  # cases whose names contain one of these; none: all
    json: Path | None = None
    command: str = "mmserve bench drafts"
    probe: Probe | None = None


class _Found(NamedTuple):
    """Of one side of a case: tokens a second, every answer, tokens guessed and right."""

    rate: float
    answers: list[tuple[int, ...]]
    drafted: int
    right: int


class _Pair(NamedTuple):
    """The same, asked on both sides one right after the other."""

    plain: _Found
    helped: _Found  # by drafts


Prompts = list[tuple[Segment, ...]]


def bench_drafts(suite: DraftSuite, config: EngineConfig) -> SuiteReport:
    """With the configuration's drafter beside without one; print, write the JSON."""
    session = _Session(suite, config)
    drafting = session.engine.drafting
    if drafting is None:
        raise ValueError(f"nothing drafts for {session.engine.name}: see --speculative-config")
    plain = _Session(suite, dataclasses.replace(config, speculative=SpecConfig(method=None)))
    device, dtype = session.engine.runner.device, session.engine.runner.adapter.dtype
    report = SuiteReport(
        command=suite.command,
        suite="drafts",
        model=f"{session.engine.name}, drafts by {drafting.drafter.name}",
        facts=facts(device),
        ceilings=measure_ceilings(device, dtype, suite.probe),
        sizes={"tokens of output": suite.output_tokens, "times each": suite.repeats},
        lines=(),
    )
    report = record(report, _lines(suite, plain, session), suite.json)
    plain.engine.close()
    session.engine.close()
    print(render(report))
    return report


def _lines(suite: DraftSuite, plain: _Session, session: _Session) -> Iterator[Line]:
    for streams in suite.streams:
        for side in (plain, session):
            side.warm_up(streams)
        pairs: dict[str, list[_Pair]] = {}
        for repeat in range(suite.repeats):
            for name, prompts in session.prompts(streams, repeat):
                order = (plain, session) if repeat % 2 else (session, plain)
                found = {side: side.ask(prompts, streams) for side in order}
                pairs.setdefault(name, []).append(_Pair(found[plain], found[session]))
        for name, each in pairs.items():
            yield _line(f"{name}, {streams} streams", each)


def _line(name: str, pairs: Sequence[_Pair]) -> Line:
    equal = total = 0
    for pair in pairs:
        for one, other in zip(pair.helped.answers, pair.plain.answers, strict=True):
            equal += sum(a == b for a, b in zip(one, other, strict=False))
            total += len(other)
    ratios = sorted(pair.helped.rate / pair.plain.rate for pair in pairs)
    figures = {
        "x as fast": statistics.median(ratios),
        "x at least": ratios[0],
        "x at most": ratios[-1],
        "without": statistics.median(pair.plain.rate for pair in pairs),
        "drafted": float(sum(pair.helped.drafted for pair in pairs)),
        "right": float(sum(pair.helped.right for pair in pairs)),
        "% of tokens equal": 100 * equal / max(total, 1),
    }
    rate = statistics.median(pair.helped.rate for pair in pairs)
    return Line(name, rate, "tokens/s", figures=figures)


class _Session:
    def __init__(self, suite: DraftSuite, config: EngineConfig) -> None:
        self._suite = suite
        self.engine = Engine(config, load(config.model))
        self._params = SamplingParams(max_tokens=suite.output_tokens, temperature=0.0)
        self._count = itertools.count()

    def warm_up(self, streams: int) -> None:
        """What is captured or compiled at its first use is not what is measured: steps over
        pictures, and those with drafts of several, are others than those over text."""
        for _, prompts in self.prompts(streams, -1):
            self.ask(prompts, streams)

    def prompts(self, streams: int, repeat: int) -> Iterator[tuple[str, Prompts]]:
        """Cases in their order; a second look stands behind the first and is not without it."""
        only = self._suite.only
        for cases in self._groups(streams, repeat):
            if not only or any(part in name for part in only for name, _ in cases):
                yield from cases

    def _groups(self, streams: int, repeat: int) -> Iterator[list[tuple[str, Prompts]]]:
        if streams > len(QUESTIONS):
            yield [("questions", self._many(streams, f"question {repeat}"))]
            return
        questions = [self._chat(f"{q} ({streams}, {repeat})") for q in QUESTIONS]
        yield [("new questions", questions), ("the same again", questions)]
        if self.engine.least_image_tokens:
            shown = [draw(f"{streams} {repeat} {n}") for n in range(LOOKED_AT)]
            looks = [self._chat(text, each) for each in shown for text in LOOKS]
            yield [("new pictures", looks), ("the same pictures again", looks)]
            first = PICTURES + (10 * repeat + streams) * len(QUESTIONS)
            shown = [picture(first + n) for n in range(len(QUESTIONS))]
            captions = [self._chat(LOOKS[0], each) for each in shown]
            yield [("new drawings", captions), ("the same drawings again", captions)]
        yield [("a document repeated", [self._copying(4 * repeat + n) for n in range(4)])]

    def _many(self, streams: int, kind: str) -> Prompts:
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

    def ask(self, prompts: Sequence[tuple[Segment, ...]], streams: int) -> _Found:
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

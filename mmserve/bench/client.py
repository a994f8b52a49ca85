"""A client inside the process: asks the engine what a workload says and notes when tokens come.

Owns the clock of the measurements. Knows nothing of what the figures mean.
"""

from __future__ import annotations

import asyncio
import resource
import time

from mmserve.bench.machine import Neighbours
from mmserve.bench.stats import Record, Summary, parse_counters, summarise
from mmserve.bench.workload import Phase, Session
from mmserve.engine.async_engine import AsyncEngine
from mmserve.prompt import Message
from mmserve.request import SamplingParams, TokenEvent


class Client:
    """Greedy answers of a fixed length from a running engine."""

    def __init__(self, engine: AsyncEngine, output_tokens: int) -> None:
        self.engine = engine
        self.params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        self._asked = 0

    async def ask(self, messages: tuple[Message, ...]) -> tuple[Record, tuple[int, ...]]:
        """One request: its record and its answer's tokens.

        Raises RuntimeError if it fails: a run with failed requests measures nothing.
        """
        started = time.perf_counter()
        prompt = await self.engine.prepare(messages)
        prepared = time.perf_counter()
        self._asked += 1
        tokens: list[int] = []
        times: list[float] = []
        last = TokenEvent()
        async for last in self.engine.submit(f"bench-{self._asked}", prompt, self.params):
            times += [time.perf_counter() - started] * len(last.token_ids)
            tokens += last.token_ids
        if last.usage is None or last.timings is None or len(tokens) != self.params.max_tokens:
            raise RuntimeError(f"a request ended after {len(tokens)} tokens: {last.error}")
        record = Record(prepared - started, tuple(times), last.usage, last.timings)
        return record, tuple(tokens)

    async def converse(self, session: Session) -> list[Record]:
        """A session's turns in order, each sent with the answers before it."""
        records: list[Record] = []
        answers: list[tuple[int, ...]] = []
        for turn in range(len(session.turns)):
            record, answer = await self.ask(session.messages(turn, answers))
            records.append(record)
            answers.append(answer)
        return records

    async def run(self, phase: Phase) -> Summary:
        neighbours, before = Neighbours(), self.counters()
        started = time.perf_counter()
        if phase.concurrent:
            nested = await asyncio.gather(*(self.converse(s) for s in phase.sessions))
        else:
            nested = [await self.converse(s) for s in phase.sessions]
        seconds = time.perf_counter() - started
        records = [record for session in nested for record in session]
        counts = before, self.counters()
        others = neighbours.share()
        return summarise(phase.name, records, seconds, *counts, peak_rss_mb(), others)

    def counters(self) -> dict[str, float]:
        return parse_counters(self.engine.metrics.render().decode())


def peak_rss_mb() -> float:
    """Most memory this process has held so far, in 10^6 bytes (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6

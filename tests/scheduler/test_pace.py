"""Promised times, on a machine whose steps take what a formula says: no clock is asked.

Requests come at moments of simulated time. A step takes `BASE_S` and so much a row and an image, a
twentieth more or less.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from statistics import quantiles

import pytest

from mmserve.config import SchedulerConfig
from mmserve.errors import OverloadedError
from mmserve.scheduler.batch import Batch
from mmserve.scheduler.pace import FIRST_ROWS, LEAST_ROWS, Pace, Waiting
from mmserve.sequence import Sequence
from tests.scheduler.world import World, image, prompt

BASE_S, ROW_S, IMAGE_S = 0.010, 0.0001, 0.004
ITL_S, TTFT_S = 0.025, 0.5  # the targets: 150 rows a step, less a margin
ANSWER = 20  # tokens
PROMPTS = (40, 200, 700)  # text tokens
LEARNING = 20  # requests, until steps of all sizes have been seen
ROOMY = 4000  # pages


class Quick(World):
    """Without the checks that other tests make of every step."""

    def step(self) -> Batch:
        batch = self.scheduler.schedule()
        for job in batch.images:
            self.scheduler.holdings.settle(job.key, written=True)
        for chunk in batch.chunks:
            self.scheduler.advance(chunk)
            if chunk.samples:
                chunk.seq.append(1)
                if self._complete(chunk.seq):
                    self._end(chunk.seq)
        return batch


@dataclass
class Run:
    """What became of the requests, in simulated seconds."""

    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    refused: int = 0


class Simulation:
    def __init__(
        self, *, ttft: float = TTFT_S, itl: float = ITL_S, seed: int = 1, images: bool = False
    ) -> None:
        config = SchedulerConfig(slo_ttft_s=ttft, slo_itl_s=itl, max_num_seqs=64)
        self.world = Quick(ROOMY, ROOMY, config=config, prefix_caching=False)
        self.run = Run()
        self._random, self._images = random.Random(seed), images
        self._now, self._asked = 0.0, 0
        self._came: dict[str, float] = {}
        self._seated: dict[str, float] = {}
        self._last: dict[str, float] = {}

    def go(self, rate: float, requests: int) -> Run:
        """So many requests, `rate` a second."""
        arrival = 0.0
        for _ in range(requests):
            arrival += self._random.expovariate(rate)
            while self.world.scheduler.has_work and self._now < arrival:
                self._step()
            self._now = max(self._now, arrival)
            self._ask()
        while self.world.scheduler.has_work:
            self._step()
        return self.run

    def _ask(self) -> None:
        tokens = self._random.choice(PROMPTS)
        pace, live = self.world.scheduler.pace, self.world.live
        if pace is not None:
            waiting = [seq for seq in live if not seq.num_output_tokens]
            left = sum(map(pace._left, waiting))
            images = 2 * self._images
            try:
                asked = pace.weigh(tokens, 6 * images, images)
                pace.check(asked, Waiting(left, len(waiting), len(live)))
            except OverloadedError as error:
                assert error.retry_after_s is not None and error.retry_after_s > 0
                self.run.refused += 1
                return
        self._asked += 1
        parts = [image(self._asked * 2 + n) for n in range(2 * self._images)]
        seq = self.world.submit(prompt(*parts, tokens, base=self._asked), ANSWER)
        self._came[seq.id] = self._now

    def _step(self) -> None:
        batch = self.world.step()
        rows, images = sum(c.num_rows for c in batch.chunks), len(batch.images)
        seconds = BASE_S + ROW_S * rows + IMAGE_S * images
        seconds *= self._random.uniform(0.95, 1.05)
        for chunk in batch.chunks:
            self._seated.setdefault(chunk.seq.id, self._now)
        self._now += seconds
        if self.world.scheduler.pace is not None:
            self.world.scheduler.pace.measured(rows, images, seconds)
        for chunk in batch.chunks:
            if chunk.samples:
                self._observe(chunk.seq)

    def _observe(self, seq: Sequence) -> None:
        """A token of it has come."""
        if self._asked > LEARNING:
            if seq.id in self._last:
                self.run.gaps.append(self._now - self._last[seq.id])
            else:
                self.run.ttft.append(self._now - self._came[seq.id])
        self._last[seq.id] = self._now
        if seq.finished and self.world.scheduler.pace is not None:
            self.world.scheduler.pace.ended(self._now - self._seated[seq.id])


def most(values: list[float]) -> float:
    """Of a hundred, at most one is larger."""
    return quantiles(values, n=100)[-1]


CALM, FLOOD = 2.0, 60.0  # requests a second; the steps that the targets allow compute some 12


@pytest.mark.parametrize("images", [False, True])
def test_what_can_be_kept_is_kept_and_nobody_is_refused(images: bool) -> None:
    run = Simulation(images=images).go(CALM, 250)
    assert run.refused == 0
    assert most(run.gaps) <= ITL_S and most(run.ttft) <= TTFT_S


@pytest.mark.parametrize("images", [False, True])
def test_what_would_break_a_promise_is_refused_and_the_others_are_kept(images: bool) -> None:
    run = Simulation(images=images).go(FLOOD, 600)
    assert run.refused > 200
    assert len(run.ttft) > 60, "too few are served"
    assert most(run.gaps) <= ITL_S and most(run.ttft) <= TTFT_S


def test_without_promises_the_same_flood_breaks_both_and_nobody_is_refused() -> None:
    run = Simulation(ttft=0, itl=0).go(FLOOD, 400)
    assert run.refused == 0
    assert most(run.gaps) > 2 * ITL_S and most(run.ttft) > 2 * TTFT_S


def test_with_one_promise_only_that_one_is_kept() -> None:
    run = Simulation(ttft=0).go(FLOOD, 300)
    assert run.refused == 0 and most(run.gaps) <= ITL_S and most(run.ttft) > 2 * TTFT_S
    run = Simulation(itl=0).go(FLOOD, 400)
    assert run.refused and most(run.ttft) <= TTFT_S and most(run.gaps) > 2 * ITL_S


def test_a_promise_that_no_step_can_keep_stops_nothing() -> None:
    simulation = Simulation(itl=BASE_S / 2, ttft=0)
    simulation.go(CALM, 40)
    assert len(simulation.world.done) == 40


def test_nothing_is_planned_for_where_nothing_was_promised() -> None:
    assert Pace.of(SchedulerConfig()) is None


def test_an_idle_engine_refuses_nobody_and_sizes_are_approached_by_doubling() -> None:
    pace = Pace(SchedulerConfig(slo_ttft_s=0.001, slo_itl_s=1.0))
    pace.check(100_000, Waiting(0, 0, 0))
    assert pace.seats == FIRST_ROWS - LEAST_ROWS
    pace.measured(60, 0, 0.01)
    assert pace._feasible == 120
    with pytest.raises(OverloadedError, match=r"the target is 0\.001 s"):
        pace.check(1000, Waiting(500, 1, 1))

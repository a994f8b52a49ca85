"""A step between its launch and its landing.

Owns whose chosen tokens are whose. Knows nothing of what is made of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mmserve.engine.live import Row
from mmserve.engine.sampler import Drawn, SampledToken
from mmserve.engine.taps import Heard
from mmserve.scheduler.batch import Batch, Chunk


class Flight(NamedTuple):
    """A launched step. `chunks`: whose tokens `drawn` has, in order, `Chunk.num_chosen` of each;
    `live`: whose they are; `started`: `time.monotonic`; `heard`: for a drafter;
    `drafted`: whether there are drafts in it."""

    batch: Batch
    chunks: list[Chunk]
    live: list[Row]
    drawn: Drawn
    started: float
    heard: Heard
    drafted: bool = False

    def parts(self, tokens: list[SampledToken]) -> Iterator[tuple[Row, Chunk, list[SampledToken]]]:
        """What has been chosen for each request that has not ended meanwhile."""
        at = 0
        for live, chunk in zip(self.live, self.chunks, strict=True):
            if not live.seq.finished:
                yield live, chunk, tokens[at : at + chunk.num_chosen]
            at += chunk.num_chosen

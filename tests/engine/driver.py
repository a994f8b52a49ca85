"""Drives an engine step by step in the test's own thread and keeps what came out."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from mmserve.engine.engine import Engine
from mmserve.engine.figures import describe
from mmserve.engine.model_runner import Logits
from mmserve.request import (
    ImageInput,
    ImageSegment,
    Request,
    SamplingParams,
    Segment,
    Streaming,
    TextSegment,
    TokenEvent,
)
from mmserve.scheduler.batch import Batch
from tests.engine.tiny import build_tiny, tiny_config
from tests.vision.images import encode, noise

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def picture(seed: int, size: int = 8) -> bytes:
    """A small PNG file that differs with the seed."""
    return encode(noise(size, size, seed), "PNG")


def words(seed: int, count: int) -> TextSegment:
    """Plain random tokens, none of them special."""
    random = torch.Generator().manual_seed(seed)
    return TextSegment(tuple(torch.randint(3, 259, (count,), generator=random).tolist()))


def tiny_driver(overlaps: bool = False, **options: Any) -> Driver:
    """Of a tiny engine with these pools and steps; `overlaps`: steps are launched ahead."""
    engine = build_tiny(tiny_config(**options))
    engine.overlaps = overlaps
    return Driver(engine)


class Driver:
    """Checks the books of both pools after every step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.durable = False  # whether the KV of its requests may outlive the engine
        self.events: dict[str, list[TokenEvent]] = {}
        self.logits: dict[str, list[Tensor]] = {}
        self._ids = map(str, itertools.count())
        self._run = engine.runner.run
        engine.runner.run = self._recorded  # type: ignore[method-assign]

    def _recorded(self, batch: Batch, previous: Tensor | None = None) -> Logits | None:
        logits = self._run(batch, previous)
        if logits is not None:
            rows = iter(logits.values)
            for chunk in logits.chunks:  # of a draft's, it is not known which count
                of_chunk = [next(rows) for _ in range(chunk.num_chosen)]
                self.logits.setdefault(chunk.seq.id, []).append(of_chunk[0].clone())
            assert next(rows, None) is None
        return logits

    def image(self, data: bytes) -> ImageSegment:
        return ImageSegment(self.engine.pipeline.prepare(data))

    def submit(
        self,
        segments: tuple[Segment, ...],
        params: SamplingParams = GREEDY,
        *,
        prefill_only: bool = False,
        streaming: Streaming | None = None,
    ) -> str:
        request = Request(
            next(self._ids),
            segments,
            params,
            prefill_only,
            streaming=streaming,
            durable=self.durable,
        )
        text = sum(len(s.token_ids) for s in segments if isinstance(s, TextSegment))
        images = sum(image.num_tokens for image in request.images)
        self.engine.scheduler.check_admissible(request, text, images)
        self.engine.add(request)
        self.events[request.id] = []
        return request.id

    def step(self) -> None:
        for request_id, event in self.engine.step():
            self.events[request_id].append(event)
        self.engine.scheduler.check_invariants()

    def run(self) -> None:
        for _ in range(20_000):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"no end in sight: {describe(self.engine.scheduler)}")

    def ask(self, *segments: Segment, params: SamplingParams = GREEDY) -> list[int]:
        """Submit, run to the end; the tokens."""
        request = self.submit(segments, params)
        self.run()
        return self.tokens(request)

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)
        self.engine.scheduler.check_invariants()

    def tokens(self, request_id: str) -> list[int]:
        return [token for event in self.events[request_id] for token in event.token_ids]

    def text(self, request_id: str) -> str:
        return "".join(event.text for event in self.events[request_id])

    def last(self, request_id: str) -> TokenEvent:
        """The event that ended a request; it came once, at the end."""
        *others, last = self.events[request_id]
        assert last.finish_reason is not None and last.usage is not None
        assert all(event.finish_reason is None for event in others)
        return last

    def kv(self, image: ImageInput) -> Tensor:
        """The bytes stored of an image, in logical order."""
        entry = self.engine.runner.vision[0].index.lookup(image.digest)
        assert entry is not None and entry.ready
        tokens = self.engine.runner.vision[0].tensor[:, :, :, entry.pages].flatten(3, 4)
        return tokens[:, :, :, : image.num_tokens].clone()

    def counts(self) -> tuple[float, float, float]:
        """Encoder runs, image decodes and writes to the vision pool so far."""
        m = self.engine.metrics
        counters = (m.vision_encoder_runs, m.image_decodes, m.vision_kv_writes)
        return tuple(next(iter(c.collect())).samples[0].value for c in counters)  # type: ignore[return-value]

    def assert_idle(self) -> None:
        """Text pages are free or cached; no image is referred to; nobody runs or waits."""
        holdings = self.engine.scheduler.holdings
        for g, (text, vision) in enumerate(zip(holdings.text, holdings.vision, strict=True)):
            assert text.num_free + holdings.cached_pages(g) == text.num_pages
            assert vision.num_referenced == 0 and vision.num_available == vision.num_pages
        residual = holdings.open_pages.pool
        assert residual is None or residual.num_free == residual.num_pages
        assert not self.engine.scheduler.has_work and not self.engine.has_work

"""The same weights and prompts through transformers' own `generate`, measured side by side.

Owns the peer and the order of the comparison. Knows nothing of how its figures are printed.
Both sides run on one thread of one process, so with the same cores, never at the same time.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmserve.bench.client import Client
from mmserve.bench.machine import Neighbours
from mmserve.bench.workload import Shape, build
from mmserve.config import ImageLimits, ModelConfig
from mmserve.model.loader import LoadedModel, load_model
from mmserve.prompt import Message
from mmserve.request import Segment, TextSegment
from mmserve.vision.preprocess import decode

REPEATS = 3

Times = Sequence[float]  # when each token of one stream came, in seconds from its start


@dataclass(frozen=True)
class Speed:
    """What one side did with one set of prompts."""

    ttft_ms: float  # median stream
    decode_tokens_per_s: float  # tokens after the first over their time, all streams together
    total_tokens_per_s: float  # all tokens over the whole time, prompts included

    @staticmethod
    def of(streams: Sequence[Times], seconds: float, *, together: bool) -> Speed:
        """`together`: the streams ran at once, so their decode rates add up."""
        rates = [(len(t) - 1) / (t[-1] - t[0]) for t in streams]
        return Speed(
            ttft_ms=1e3 * statistics.median(t[0] for t in streams),
            decode_tokens_per_s=sum(rates) if together else statistics.median(rates),
            total_tokens_per_s=sum(len(t) for t in streams) / seconds,
        )

    @staticmethod
    def median(runs: Sequence[Speed]) -> Speed:
        middle = statistics.median
        return Speed(
            middle(r.ttft_ms for r in runs),
            middle(r.decode_tokens_per_s for r in runs),
            middle(r.total_tokens_per_s for r in runs),
        )


@dataclass(frozen=True)
class Comparison:
    """Medians at one number of streams; the peer in one padded batch and one after another."""

    peer: str
    streams: int
    prompt_tokens: float
    ours: Speed
    batched: Speed
    one_by_one: Speed
    others_cpu: float | None  # share of all cores that other processes took meanwhile


@torch.inference_mode()
def timed_generate(lm: Any, inputs: dict[str, Tensor], output_tokens: int) -> Times:
    """Greedy `generate` of a fixed length, end of text ignored; when each token came."""
    started = time.perf_counter()
    times: list[float] = []

    def stamp(ids: Tensor, _: Any, **__: Any) -> Tensor:
        ids[:, -1].tolist()  # on a GPU the token must have been computed
        times.append(time.perf_counter() - started)
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    lm.generation_config.eos_token_id = None
    lm.generate(
        **inputs,
        max_new_tokens=output_tokens,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=[stamp],
    )
    assert len(times) == output_tokens
    return times


class Peer:
    """transformers' model of the same weights, LoRA merged, with its own attention and cache.

    Text goes in as ids, images as `inputs_embeds` from the same vision model. The mask is the
    ordinary causal one: generate has no other, so answers about images are not the served model's.
    """

    def __init__(self, config: ModelConfig, dtype: str) -> None:
        self._loaded: LoadedModel = load_model(config)
        self._lm: Any = self._loaded.lm.to(getattr(torch, dtype))
        self.name = f"transformers generate, {dtype}, {self._lm.config._attn_implementation}"

    def generate(self, prompts: Sequence[tuple[Segment, ...]], output_tokens: int) -> Times:
        """Greedy answers to all prompts in one left-padded batch; when each token came."""
        started = time.perf_counter()
        inputs = self._inputs(prompts)
        prepared = time.perf_counter() - started
        return [prepared + t for t in timed_generate(self._lm, inputs, output_tokens)]

    def _inputs(self, prompts: Sequence[tuple[Segment, ...]]) -> dict[str, Tensor]:
        text_only = all(isinstance(s, TextSegment) for prompt in prompts for s in prompt)
        part = self._ids if text_only else self._embeds
        rows = [torch.cat([part(s) for s in prompt]) for prompt in prompts]
        width = max(len(row) for row in rows)
        device = self._loaded.device
        mask = torch.zeros(len(rows), width, dtype=torch.long, device=device)
        inputs = rows[0].new_zeros(len(rows), width, *rows[0].shape[1:])
        for i, row in enumerate(rows):
            inputs[i, width - len(row) :] = row
            mask[i, width - len(row) :] = 1
        return {"input_ids" if text_only else "inputs_embeds": inputs, "attention_mask": mask}

    def _ids(self, segment: Segment) -> Tensor:
        assert isinstance(segment, TextSegment)
        return torch.tensor(segment.token_ids, device=self._loaded.device)

    def _embeds(self, segment: Segment) -> Tensor:
        if isinstance(segment, TextSegment):
            embeds: Tensor = self._lm.get_input_embeddings()(self._ids(segment))
            return embeds
        pixels = decode(segment.image.data, ImageLimits(), self._loaded.spec.image_size)
        return self._loaded.vision.encode(torch.as_tensor(pixels)[None])[0].to(self._lm.dtype)


async def compare(
    client: Client, peer: Peer, workload: str, shape: Shape, seed: int
) -> list[Comparison]:
    """Each side in turn, `REPEATS` times with new prompts, at one stream and at all sessions."""

    async def on_peer(prompts: list[tuple[Segment, ...]]) -> Times:
        # On the engine's own thread: two OpenMP teams in one process would slow both sides.
        return await client.engine.call(lambda: peer.generate(prompts, shape.output_tokens))

    out: list[Comparison] = []
    for streams in sorted({1, shape.sessions}):
        runs: list[tuple[Speed, Speed, Speed]] = []
        lengths: list[int] = []
        neighbours = Neighbours()
        for repeat in range(REPEATS + 1):
            messages = _openings(workload, shape, seed + repeat, streams)
            prompts = [await client.engine.prepare(m) for m in messages]
            segments = [prompt.segments for prompt in prompts]
            ours = await _ours(client, messages)
            batched = await _theirs(on_peer, [segments])
            one_by_one = (
                batched if streams == 1 else await _theirs(on_peer, [[s] for s in segments])
            )
            runs.append((ours, batched, one_by_one))
            lengths += [prompt.num_tokens for prompt in prompts]
        # The first repeat warms up both sides.
        ours, batched, one_by_one = map(Speed.median, zip(*runs[1:], strict=True))
        length, others = statistics.fmean(lengths), neighbours.share()
        out.append(Comparison(peer.name, streams, length, ours, batched, one_by_one, others))
    return out


def _openings(workload: str, shape: Shape, seed: int, streams: int) -> list[tuple[Message, ...]]:
    """The first turns of a workload's first sessions."""
    sessions = build(workload, shape, seed)[0].sessions
    return [session.messages(0, []) for session in sessions[:streams]]


async def _ours(client: Client, messages: Iterable[tuple[Message, ...]]) -> Speed:
    started = time.perf_counter()
    answers = await asyncio.gather(*(client.ask(m) for m in messages))
    seconds = time.perf_counter() - started
    return Speed.of([record.token_s for record, _ in answers], seconds, together=True)


async def _theirs(on_peer: Any, batches: Sequence[list[tuple[Segment, ...]]]) -> Speed:
    started = time.perf_counter()
    streams: list[Times] = []
    for batch in batches:
        waited = time.perf_counter() - started  # everyone asked at the start
        times = [waited + t for t in await on_peer(batch)]
        streams += [times] * len(batch)
    seconds = time.perf_counter() - started
    return Speed.of(streams, seconds, together=len(batches) == 1)

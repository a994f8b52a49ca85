"""`mmserve bench`: one workload, measured and reported.

Owns the order of a run: load, warm up, measure, compare. Knows nothing of flags' spelling.
"""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass
from pathlib import Path

from mmserve.bench.client import Client
from mmserve.bench.machine import Footprint, facts, read_bandwidth
from mmserve.bench.peer import Comparison, Peer, compare
from mmserve.bench.report import Bound, Report, render
from mmserve.bench.stats import Summary
from mmserve.bench.workload import Phase, Shape, build
from mmserve.config import EngineConfig
from mmserve.engine.async_engine import AsyncEngine
from mmserve.engine.engine import Engine
from mmserve.errors import RequestError

WEIGHT_BYTES = {"int8": 1, "float32": 4}
WARM_UP_SEED = -1


@dataclass(frozen=True)
class Options:
    workload: str
    shape: Shape
    seed: int = 0
    peer_dtypes: tuple[str, ...] = ()  # transformers' side; none: no comparison
    json: Path | None = None
    command: str = "mmserve bench"


def bench(options: Options, config: EngineConfig) -> None:
    """Run, print, and write the JSON. Raises ValueError for a workload that cannot run."""
    try:
        report = asyncio.run(measure(options, config))
    except RequestError as error:
        raise ValueError(error.message) from error
    print(render(report))
    if options.json:
        options.json.write_text(report.to_json() + "\n")


async def measure(options: Options, config: EngineConfig) -> Report:
    shape = options.shape
    phases = build(options.workload, shape, options.seed)
    engine = AsyncEngine(config)
    await engine.start()
    try:
        runner = engine.engine.runner
        found = facts(runner.device)
        client = Client(engine, shape.output_tokens)
        await _warm_up(client, options)
        summaries = tuple([await client.run(phase) for phase in phases])
        # After the phases: its buffers would count as the engine's peak of memory.
        bandwidth = await engine.call(lambda: read_bandwidth(runner.device))
        comparisons = await _compare(client, options, config)
        return Report(
            command=options.command,
            workload=options.workload,
            shape=shape,
            seed=options.seed,
            model=engine.info.name,
            dtype=runner.dtype,
            facts=found,
            bound=_bound(engine.engine, phases[-1], summaries[-1], shape, bandwidth),
            phases=summaries,
            comparisons=comparisons,
        )
    finally:
        await engine.stop()


async def _warm_up(client: Client, options: Options) -> None:
    """The workload's first session twice, with other words and images, alone and then paired.

    Compiles kernels, touches memory; what it leaves in the caches is the system prompt alone.
    """
    small = Shape(2, 1, options.shape.images, options.shape.prompt_tokens, 1)
    for phase in build(options.workload, small, WARM_UP_SEED):
        await client.run(phase)


async def _compare(
    client: Client, options: Options, config: EngineConfig
) -> tuple[Comparison, ...]:
    out: list[Comparison] = []
    for dtype in options.peer_dtypes:
        make = functools.partial(Peer, config.model, dtype)
        peer = await client.engine.call(make)
        seed = options.seed + 1000  # prompts the engine has not seen
        out += await compare(client, peer, options.workload, options.shape, seed)
    return tuple(out)


def _bound(engine: Engine, phase: Phase, summary: Summary, shape: Shape, bandwidth: float) -> Bound:
    streams = min(len(phase.sessions), engine.scheduler.config.max_num_seqs)
    if not phase.concurrent:
        streams = 1
    kv = engine.runner.text[0].shape
    footprint = Footprint(_weights(engine), kv.page_bytes // kv.page_size)
    context = summary.prompt_tokens + shape.output_tokens / 2
    return Bound(
        gigabytes_per_s=bandwidth / 1e9,
        weight_megabytes=footprint.weight_bytes / 1e6,
        kv_kilobytes_per_token=footprint.kv_bytes_per_token / 1e3,
        streams=streams,
        context_tokens=context,
        tokens_per_s=footprint.bound(bandwidth, streams, context),
    )


def _weights(engine: Engine) -> int:
    """Bytes of all matrices a token passes through, from the model's shape."""
    c = engine.runner.lm.config
    kv = engine.runner.text[0].shape
    heads = c.num_attention_heads * kv.head_dim
    attention = c.hidden_size * (2 * heads + 2 * kv.num_kv_heads * kv.head_dim)
    mlp = 3 * c.hidden_size * c.intermediate_size
    weights = c.num_hidden_layers * (attention + mlp) + c.vocab_size * c.hidden_size
    return int(weights) * WEIGHT_BYTES[engine.runner.dtype]

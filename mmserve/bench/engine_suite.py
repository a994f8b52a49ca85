"""`mmserve bench engine`: one shape, its ceilings, the peer and the engine's cases in one run.

Owns the order (peer before the engine, which fuses the weights they share) and the pools' sizes.
Knows nothing of flags' spelling.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mmserve.bench.ceilings import GIB, Ceilings, Probe, measure_ceilings
from mmserve.bench.dims import NO_TOWER, ModelShape
from mmserve.bench.engine_cases import EngineCases, Plan
from mmserve.bench.load import Load
from mmserve.bench.machine import facts
from mmserve.bench.peer_cases import PeerCases
from mmserve.bench.shapes import load_shape
from mmserve.bench.sizes import Sizes, kv_bytes_per_token
from mmserve.bench.suite import Line, SuiteReport, record, render, run_cases
from mmserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpecConfig
from mmserve.energy import board_reader
from mmserve.engine.engine import Engine
from mmserve.engine.meter import board_uuid
from mmserve.model.loader import LoadedModel, resolve_device

POOL_IMAGES = 64  # images the vision pool holds
SPARE_BYTES = 12 * GIB  # of the device: activations of the longest step, graphs, libraries


@dataclass(frozen=True)
class EngineSuite:
    """`shape` None is the default model with its real weights."""

    shape: ModelShape | None
    peer: bool = False
    only: tuple[str, ...] = ()  # cases whose names contain one of these; none: all
    budget_s: float = 300.0  # behind building the engine; the peer's cases have as much again
    step_tokens: int = 8192  # text tokens in one step
    json: Path | None = None
    command: str = "mmserve bench engine"
    seed: int = 0
    plan: Plan = field(default_factory=Plan)
    probe: Probe | None = None


def bench_engine(suite: EngineSuite, config: ModelConfig) -> SuiteReport:
    """Run, print, and write the JSON."""
    device = resolve_device(config.device)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    loaded = load_shape(suite.shape, config, device, suite.seed)
    sizes = Sizes.of(loaded)
    ceilings = measure_ceilings(device, loaded.lm.dtype, suite.probe)
    report = SuiteReport(
        command=suite.command,
        suite="engine",
        model=_title(suite, config, loaded),
        facts=facts(device),
        ceilings=ceilings,
        sizes=sizes.shown(),
        lines=(),
    )
    lines = _lines(suite, config, loaded, sizes, ceilings)
    report = record(report, lines, suite.json)
    print(render(report))
    return report


def _lines(
    suite: EngineSuite,
    config: ModelConfig,
    loaded: LoadedModel,
    sizes: Sizes,
    ceilings: Ceilings,
) -> Iterator[Line]:
    plan = suite.plan
    peers = PeerCases(loaded, plan.decode[:2])
    if suite.peer:
        yield from run_cases(peers.generate(), time.monotonic() + suite.budget_s)
    gc.collect()
    if loaded.device.type == "cuda":
        torch.cuda.empty_cache()
    engine = Engine(_engine_config(suite, config, loaded), loaded)
    itemsize = 1 if engine.runner.dtype == "int8" else engine.runner.text[0].shape.dtype.itemsize
    sizes = dataclasses.replace(sizes, itemsize=itemsize)
    deadline = time.monotonic() + suite.budget_s
    read = board_reader(board_uuid(loaded.device)) if loaded.device.type == "cuda" else None
    load = Load(engine, read, suite.seed, deadline)
    cases = EngineCases(load, sizes, ceilings, plan, peers.speeds, _shows(suite)).all()
    chosen = [c for c in cases if not suite.only or any(part in c.name for part in suite.only)]
    yield from run_cases(chosen, deadline)


def _title(suite: EngineSuite, config: ModelConfig, loaded: LoadedModel) -> str:
    if not _shows(suite):
        return loaded.spec.name
    mode = "isolated" if config.vision_mode == "auto" else config.vision_mode
    return f"{loaded.spec.name}, {mode} images"


def _shows(suite: EngineSuite) -> bool:
    """Whether the shape's own images are worth measuring."""
    return suite.shape is None or suite.shape.vision != NO_TOWER


def _engine_config(suite: EngineSuite, config: ModelConfig, loaded: LoadedModel) -> EngineConfig:
    """Pools for the largest case, or what the device has left for the text pool."""
    plan, page = suite.plan, CacheConfig().page_size
    token = kv_bytes_per_token(loaded.lm)
    image_pages = -(-loaded.spec.num_image_tokens // page)
    vision = max(POOL_IMAGES, 2 * max(plan.shared)) * image_pages * page * token
    text = (plan.text_tokens() + page * plan.sessions) * token
    if loaded.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(loaded.device)
        text = min(text, free - vision - SPARE_BYTES)
    return EngineConfig(
        model=config,
        speculative=SpecConfig(method=None),
        cache=CacheConfig(text_bytes=max(text, page * token), vision_bytes=vision),
        scheduler=SchedulerConfig(
            max_num_seqs=max(plan.sessions, *(batch for batch, _ in plan.decode)),
            max_num_batched_tokens=suite.step_tokens,
        ),
    )

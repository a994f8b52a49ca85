"""`mmserve bench restore`: how long a session's KV takes to come back, and to compute again.

Owns the order and what is cleared between two times. Knows nothing of how tiers move anything.

The time is that to the first token, with nothing else running: what comes from a tier, and the rest
of the last run, which is computed. Before files are read, the system is asked to forget them.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mmserve.bench.ceilings import Probe, measure_ceilings, synchronize
from mmserve.bench.dims import ModelShape
from mmserve.bench.load import Load
from mmserve.bench.machine import facts
from mmserve.bench.shapes import load_shape
from mmserve.bench.sizes import Sizes, kv_bytes_per_token
from mmserve.bench.suite import Line, SuiteReport, record, render
from mmserve.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpecConfig,
    TierConfig,
)
from mmserve.engine.engine import Engine
from mmserve.engine.kv_tiers import KVTiers
from mmserve.model.loader import LoadedModel, resolve_device
from mmserve.request import Request, SamplingParams, Segment

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
ROOM = 8  # tokens for the answer


@dataclass(frozen=True)
class RestoreSuite:
    """`shape` None is the default model with its real weights."""

    shape: ModelShape | None
    tokens: int = 32_768  # of the session's text
    step_tokens: int = 8192  # text tokens in one step
    repeats: int = 3
    json: Path | None = None
    command: str = "mmserve bench restore"
    seed: int = 0
    probe: Probe | None = None


def bench_restore(suite: RestoreSuite, config: ModelConfig) -> SuiteReport:
    """Run, print, and write the JSON. Files go where the system puts temporary ones (TMPDIR)."""
    device = resolve_device(config.device)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    shape = suite.shape
    if shape is not None:
        shape = dataclasses.replace(shape, max_model_len=suite.tokens + 64)
    loaded = load_shape(shape, config, device, suite.seed)
    sizes = Sizes.of(loaded)
    report = SuiteReport(
        command=suite.command,
        suite="restore",
        model=loaded.spec.name,
        facts=facts(device),
        ceilings=measure_ceilings(device, loaded.lm.dtype, suite.probe),
        sizes=sizes.shown(),
        lines=(),
    )
    with tempfile.TemporaryDirectory(prefix="mmserve-kv-") as folder:
        engine = Engine(_engine_config(suite, config, loaded, Path(folder)), loaded)
        try:
            lines = _Restore(suite, engine, Path(folder)).lines()
            report = record(report, lines, suite.json)
        finally:
            engine.close()
    print(render(report))
    return report


def _engine_config(
    suite: RestoreSuite, config: ModelConfig, loaded: LoadedModel, folder: Path
) -> EngineConfig:
    page, token = CacheConfig().page_size, kv_bytes_per_token(loaded.lm)
    session = (suite.tokens + 64) * token
    images = 4 * (loaded.spec.num_image_tokens + page) * token
    return EngineConfig(
        model=config,
        speculative=SpecConfig(method=None),
        cache=CacheConfig(text_bytes=session + 4 * page * token, vision_bytes=images),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=suite.step_tokens),
        tiers=TierConfig(host_bytes=4 * session, disk_bytes=4 * session, folder=folder),
    )


class _Restore:
    def __init__(self, suite: RestoreSuite, engine: Engine, folder: Path) -> None:
        assert engine.tiers is not None
        self._engine, self._folder, self._repeats = engine, folder, suite.repeats
        self._name = f"{suite.tokens} tokens"
        self._tiers: KVTiers = engine.tiers
        load = Load(engine, seed=suite.seed)
        self._prompt: Sequence[Segment] = (load.text(suite.tokens - ROOM),)
        self._count = 0
        self._tokens: tuple[int, ...] | None = None

    def lines(self) -> Iterator[Line]:
        name = self._name
        self._time(lift=False)  # compiles, and writes the objects
        self._tiers.stack.settle()
        moved = self._tiers.stack.used("disk")[1]
        computed = statistics.median(self._time(lift=False) for _ in range(self._repeats))
        yield Line(f"compute {name}", 1e3 * computed, "ms", figures={"GB of KV": moved / 1e9})
        for tier in ("host", "disk"):
            seconds = statistics.median(self._time(tier=tier) for _ in range(self._repeats))
            speed = {"GB/s": moved / 1e9 / seconds, "x as fast": computed / seconds}
            yield Line(f"restore {name} from {tier}", 1e3 * seconds, "ms", figures=speed)

    def _time(self, tier: str = "host", *, lift: bool = True) -> float:
        """Seconds to the first token; nothing of the session is in the pools."""
        engine, tiers = self._engine, self._tiers
        radix = engine.scheduler.holdings.radix
        assert radix is not None
        radix.clear()
        if tier == "disk":
            tiers.stack.clear_host()
            _forget_files(self._folder)
        # Whatever it costs, it is what is measured.
        tiers.costs.byte_s.clear()
        tiers.costs.token_s = None
        engine.scheduler.lift = tiers.lifter.lift if lift else lambda seq: True
        self._count += 1
        synchronize(engine.runner.device)
        started = time.perf_counter()
        engine.add(Request(f"restore-{self._count}", tuple(self._prompt), GREEDY, durable=True))
        first, tokens = 0.0, list[int]()
        cached = 0
        while engine.has_work:
            for _, event in engine.step():
                first = first or time.perf_counter() - started
                tokens += event.token_ids
                if event.usage is not None:
                    cached = event.usage.cached_tokens
        if self._tokens not in (None, tuple(tokens)):
            raise RuntimeError(f"a restored session gave other tokens: {tokens}")
        self._tokens = tuple(tokens)
        if lift != (cached > 0):
            raise RuntimeError(
                f"{cached} tokens were found, with the tiers {'on' if lift else 'off'}"
            )
        return first


def _forget_files(folder: Path) -> None:
    """Have the system read them from the disk again, where it can be told to."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

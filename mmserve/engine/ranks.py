"""Tensor parallel: one engine over several processes of this machine.

Owns how ranks are started and what cannot be had with them. The first rank is this process; each of
the others loads its part of the model by the same recipe, makes the same runner and does as it is
told. One that loses the first ends. Knows nothing of steps.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mmserve.config import EngineConfig
from mmserve.engine.border import Border
from mmserve.engine.build_runner import build_runner
from mmserve.engine.engine import Engine
from mmserve.engine.model_runner import ModelRunner
from mmserve.engine.team import Follower, Leader, Pipes, Seat
from mmserve.model.shard import Split
from mmserve.model.weights import Loaded

logger = logging.getLogger(__name__)

# Loads a model and has its LM split; any process can unpickle it. On a GPU it is the current one.
Recipe = Callable[[EngineConfig, Split], Loaded]


def parallel_engine(config: EngineConfig, recipe: Recipe, border: Border | None = None) -> Engine:
    """An engine over `config.tensor_parallel_size` ranks. Raises ValueError for what cannot be
    split, and what loading raises."""
    ranks = config.tensor_parallel_size
    refuse(config)
    config = replace(config, model=replace(config.model, num_threads=threads(config)))
    torch.set_num_threads(threads(config))
    team = Leader(ranks, partial(start, config, recipe))
    try:
        loaded = recipe(config, team.split)
        make = partial(build_runner, team=team)
        engine = Engine(config, loaded, border, make_runner=make)
        refuse_model(engine.runner)
        return engine
    except BaseException:
        team.close()
        raise


def threads(config: EngineConfig) -> int:
    """CPU threads of each rank: they share the cores."""
    given = config.model.num_threads
    return given or max(torch.get_num_threads() // config.tensor_parallel_size, 1)


def refuse(config: EngineConfig) -> None:
    """Raises ValueError for what needs all of the KV in one process."""
    reasons = {
        "--vision-kv-cold-dtype": config.cache.cold_format is not None,
        "--host-kv-bytes": bool(config.tiers.host_bytes),
        "--kv-object-store": config.tiers.object_store is not None,
        "--stages": bool(config.stages),
        "--dtype int8": config.model.dtype == "int8",
    }
    for flag, given in reasons.items():
        if given:
            raise ValueError(f"{flag} cannot be had with --tensor-parallel-size above 1")
    count, ranks = torch.cuda.device_count(), config.tensor_parallel_size
    if config.model.device != "cpu" and 0 < count < ranks:
        raise ValueError(f"{ranks} ranks need as many GPUs; this machine has {count}")


def refuse_model(runner: ModelRunner) -> None:
    """Raises ValueError for a model of which not everything is done by every rank."""
    if runner.adapter.cross is not None:
        raise ValueError("models that look at images by cross attention cannot be split over ranks")


def start(config: EngineConfig, recipe: Recipe, seat: Seat) -> tuple[Any, Pipes]:
    """A rank's process, and the pipes to it."""
    context = multiprocessing.get_context("spawn")
    mine, its = zip(context.Pipe(), context.Pipe(), strict=True)
    arguments = (seat, Pipes(*its), config, recipe)
    name = f"rank {seat.rank}"
    process = context.Process(target=run_rank, args=arguments, name=name, daemon=True)
    process.start()
    for end in its:
        end.close()
    return process, Pipes(*mine)


def run_rank(seat: Seat, pipes: Pipes, config: EngineConfig, recipe: Recipe) -> None:
    """A follower's process, from its start to its end."""
    for told in (signal.SIGINT, signal.SIGTERM):  # terminals and systemd tell all; the first ends
        signal.signal(told, signal.SIG_IGN)
    torch.set_num_threads(threads(config))
    if torch.cuda.is_available() and config.model.device != "cpu":
        torch.cuda.set_device(seat.rank)
    team = Follower(seat, pipes)
    loaded = recipe(config, team.split)
    runner = build_runner(loaded, config, team)
    with torch.inference_mode():
        team.obey(runner)
    os._exit(0)  # what waits on a device for a rank that is gone would wait for ever

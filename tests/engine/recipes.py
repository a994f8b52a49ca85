"""How the ranks of a test's engine load their models; imported in each of their processes."""

from __future__ import annotations

import multiprocessing
from typing import Any

from mmserve.config import EngineConfig
from mmserve.engine import ranks
from mmserve.engine.cuda_runner import CUDARunner
from mmserve.engine.team import Team
from mmserve.model.shard import Split
from tests.engine.tiny import tiny_model


def tiny(config: EngineConfig, split: Split) -> Any:
    loaded = tiny_model()
    split(loaded.lm)
    return loaded


def tiny_on_the_gpus_runner(config: EngineConfig, split: Split) -> Any:
    """In Triton's interpreter, in whichever process it is called."""
    setattr(ranks, "build_runner", on_the_gpus_runner)  # noqa: B010
    return tiny(config, split)


def on_the_gpus_runner(loaded: Any, config: EngineConfig, team: Team | None = None) -> CUDARunner:
    return CUDARunner(loaded, config.cache, config.model, config.scheduler, team)


def tiny_with_the_first(config: EngineConfig, split: Split) -> Any:
    if multiprocessing.parent_process() is not None:
        raise RuntimeError("no weights here")
    return tiny(config, split)

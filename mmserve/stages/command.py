"""`mmserve serve --stages`, and `mmserve stage`: a worker for a server elsewhere.

Owns how places in words become workers, and where the key comes from. Knows nothing of HTTP.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from mmserve.config import STAGES, EngineConfig, StageConfig
from mmserve.engine_flags import add_engine_flags, engine_config

if TYPE_CHECKING:  # its way there loads PyTorch
    from mmserve.handover.wire import Kind

KEY = "MMSERVE_STAGE_KEY"  # in the environment: no list of processes shows it


def key_of_environment() -> bytes:
    """Raises ValueError."""
    if not (key := os.environ.get(KEY, "")):
        raise ValueError(f"workers elsewhere need a secret of your own in {KEY}, on both sides")
    return key.encode()


@contextmanager
def staged(config: EngineConfig, stages: Sequence[tuple[str, str]]) -> Iterator[EngineConfig]:
    """The configuration of a server's engine, with such workers beside it (`flags.stages`) until
    the end. Raises ValueError."""
    if not stages:
        yield config
        return
    from mmserve.engine import ranks
    from mmserve.engine.build_engine import build_engine
    from mmserve.stages.workers import Place, StageWorkers

    places: list[Place] = []
    far: list[tuple[Kind, str]] = []
    for word, where in stages:
        kind = cast("Kind", word)
        if where.isdecimal():
            places += [Place(kind)] * int(where)
        elif where == "cpu":
            places.append(Place(kind, "cpu"))
        elif where.startswith("cuda:"):
            places.append(Place(kind, "cuda", int(where.removeprefix("cuda:"))))
        else:
            far.append((kind, where))
    key = key_of_environment() if far else None
    workers = StageWorkers(config, build_engine, places, far, key)
    if config.tensor_parallel_size > 1:
        ranks.refuse(workers.config)
    workers.start()
    try:
        yield workers.config
    finally:
        workers.close()


def _stage(args: argparse.Namespace) -> None:
    from mmserve.engine.build_engine import build_engine
    from mmserve.stages.worker import serve
    from mmserve.stages.workers import worker_config

    encode = tuple(args.encode or ())
    config = replace(engine_config(args), stages=StageConfig(encode, (), key_of_environment()))
    gpu: int | None = args.gpu
    serve(args.kind, args.listen, worker_config(config, args.kind, None), build_engine, gpu)


def add_stage_command(commands: Any) -> None:
    stage = commands.add_parser(
        "stage", help=f"a worker for `mmserve serve --stages` elsewhere; needs {KEY}"
    )
    stage.add_argument("kind", choices=STAGES)
    stage.add_argument("--listen", required=True, metavar="HOST:PORT")
    stage.add_argument("--gpu", type=int, metavar="N", help="which one (default: the first)")
    stage.add_argument(
        "--encode", action="append", metavar="HOST:PORT", help="of prefill: whom it may ask"
    )
    add_engine_flags(stage)
    stage.set_defaults(run=_stage)

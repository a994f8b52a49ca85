"""The stage workers of this host: started, watched, and started again.

Owns their processes and addresses. Knows nothing of what they do. One that ends is replaced, later
and later if it does not last; nobody is told, since who asks for its work finds out by himself.
"""

from __future__ import annotations

import logging
import multiprocessing
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmserve.config import DecodingConfig, EngineConfig, SpecConfig, StageConfig, TierConfig
from mmserve.handover.wire import Kind
from mmserve.stages.worker import Make, run_worker

logger = logging.getLogger(__name__)

LASTS_S = 30.0  # a worker that ends sooner is started again later
LONGEST_PAUSE_S = 30.0
END_S = 5.0  # for a process that is told to end


@dataclass(frozen=True)
class Place:
    """Where a worker runs. `gpu`: its number; None: as the configuration says."""

    kind: Kind
    device: str | None = None
    gpu: int | None = None


def worker_config(config: EngineConfig, kind: Kind, device: str | None) -> EngineConfig:
    """A worker's: it keeps nothing below its pools, drafts nothing, and decodes pictures in its own
    process, which others outlive. One that prefills asks those that encode."""
    stages = replace(config.stages, prefill=())
    if kind == "encode":
        stages = replace(stages, encode=())
    return replace(
        config,
        model=replace(config.model, device=device or config.model.device),
        tiers=TierConfig(folder=None),
        decoding=DecodingConfig(),
        speculative=SpecConfig(method=None),
        stages=stages,
        watchdog_s=0.0,
    )


class StageWorkers:
    """From `start` to `close`. `addresses`: of workers elsewhere, by kind."""

    def __init__(
        self,
        config: EngineConfig,
        make: Make,
        places: Sequence[Place],
        addresses: Sequence[tuple[Kind, str]] = (),
        key: bytes | None = None,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="mmserve-stages-"))
        own = [(p.kind, str(self._folder / f"{n}")) for n, p in enumerate(places)]
        every = [*own, *addresses]
        stages = StageConfig(
            encode=tuple(address for kind, address in every if kind == "encode"),
            prefill=tuple(address for kind, address in every if kind == "prefill"),
            key=key or secrets.token_bytes(32),
        )
        self.config = replace(config, stages=stages)  # of the server's engine
        self._make = make
        self._closed = threading.Event()
        self.processes: dict[int, Any] = {}
        self._keepers = [
            threading.Thread(
                target=self._keep, args=(n, place, own[n][1]), name="stages", daemon=True
            )
            for n, place in enumerate(places)
        ]

    def start(self) -> None:
        for keeper in self._keepers:
            keeper.start()

    def close(self) -> None:
        self._closed.set()
        for keeper in self._keepers:
            keeper.join(2 * END_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _keep(self, number: int, place: Place, address: str) -> None:
        """One worker after another."""
        pause = 0.0
        while not self._closed.is_set():
            started = time.monotonic()
            process = self._start(place, address)
            self.processes[number] = process
            while process.is_alive() and not self._closed.wait(0.1):
                pass
            if self._closed.is_set():
                return _end(process)
            lasted = time.monotonic() - started
            pause = 0.0 if lasted > LASTS_S else min(2 * pause + 0.5, LONGEST_PAUSE_S)
            logger.warning(
                "the %s worker %d has ended (status %s); another one starts in %g s",
                *(place.kind, number, process.exitcode, pause),
            )
            self._closed.wait(pause)

    def _start(self, place: Place, address: str) -> Any:
        Path(address).unlink(missing_ok=True)  # of one that was killed
        config = worker_config(self.config, place.kind, place.device)
        process = multiprocessing.get_context("spawn").Process(
            target=run_worker,
            args=(place.kind, address, config, self._make, place.gpu),
            name=f"stage {place.kind}",
            daemon=True,
        )
        process.start()
        return process


def _end(process: Any) -> None:
    process.kill()  # it has nothing to write
    process.join(END_S)

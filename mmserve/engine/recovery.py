"""What is done about an engine that has failed: go on, start anew with the same weights, give up.

Owns the judgement of a fault, and how often in a row each way is tried. Runs on the engine's
thread; knows nothing of threads, readers or processes.
"""

from __future__ import annotations

import logging

import torch

from mmserve.engine.engine import Engine
from mmserve.faults import Faults
from mmserve.request import FinishReason

log = logging.getLogger(__name__)

STEPS_IN_A_ROW = 3  # that may fail before the engine's books are no longer trusted
RESTARTS_IN_A_ROW = 3  # without a token between them before nobody hopes for the next one
FAILED = "The engine failed; please try again."
NO_MEMORY = "The device ran out of memory; please try again."


class BrokenEngineError(Exception):
    """The engine's books cannot be trusted; its weights can."""


class EngineLostError(Exception):
    """No engine of this process can compute any more."""


class Recovery:
    """For all engines of one thread, one after another."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._steps = self._restarts = 0  # failed, in a row

    def succeeded(self) -> None:
        """Something came out of a step."""
        self._steps = self._restarts = 0

    def after_step(self, engine: Engine, error: Exception) -> None:
        """A step has failed: its requests end, the others go on. Raises `EngineLostError` or
        `BrokenEngineError` where they cannot."""
        log.error("a step failed; its requests end with an error", exc_info=error)
        self._check(engine, error)
        self._steps += 1
        self._faults.at("engine.recover")
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            engine.end_running(FinishReason.ERROR, NO_MEMORY, "out_of_memory")
            shrink(engine)
        else:
            engine.abort_all(FinishReason.ERROR, FAILED, "engine_restarted")
        if self._steps >= STEPS_IN_A_ROW:
            raise BrokenEngineError(f"{self._steps} steps in a row have failed") from error

    def anew(self, engine: Engine, error: Exception) -> Engine:
        """One in place of an engine that failed, which must not be used again. Raises
        `EngineLostError`."""
        log.error("the engine starts anew", exc_info=error)
        self._restarts += 1
        if self._restarts > RESTARTS_IN_A_ROW:
            raise EngineLostError(f"it failed {self._restarts} times in a row") from error
        self._check(engine, error)
        try:
            self._steps = 0
            return anew(engine)
        except Exception as failure:
            raise EngineLostError("it could not be started anew") from failure

    def _check(self, engine: Engine, error: Exception) -> None:
        """After some faults every later call of a device fails, too, and a rank that is gone does
        not come again. Raises `EngineLostError`."""
        device = engine.runner.device
        if engine.runner.team.lost:
            raise EngineLostError("a rank of the model's is gone") from error
        try:
            self._faults.at("device.probe")
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                torch.ones(1, device=device).add_(1).item()
        except torch.OutOfMemoryError:
            return
        except Exception:
            raise EngineLostError("the device no longer computes") from error


def shrink(engine: Engine) -> None:
    """Give back memory that is held only to save work; the pools stay as they are."""
    engine.runner.shrink()
    if engine.tiers is not None:
        engine.tiers.stack.clear_host()
    if engine.runner.device.type == "cuda":
        torch.cuda.empty_cache()


def anew(engine: Engine) -> Engine:
    """An engine of the same weights, border and figures with empty pools; images stay pinned."""
    if engine.tiers is not None:
        engine.tiers.close()
    engine.drafting = None  # may hold a model of its own
    engine.runner.forget()
    fresh = Engine(*engine.made_of, engine.border, before=engine)
    for image in engine.images.pinned:
        fresh.images.pin(image)
    return fresh

"""Captured launches: what a GPU does again without being told each part of it.

Owns the graphs by what each depends on, and their room. Knows nothing of what is captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# Images are looked at beside a step, by long launches. A step's go before those parts of them that
# have not begun: captured launches keep the priority of the stream that they were captured on.
URGENT = -1

# Threads that bring KV from files pin memory meanwhile, which is no part of a capture.
ALONE: Any = {"capture_error_mode": "thread_local"}


class Graphs:
    """They share their memory: only one runs at a time, and what it has returned is there until
    the next is run. `what` they are is said when they cannot be captured."""

    captures = 0  # by all of them: while one is captured, all wait, as they never will again

    def __init__(self, device: torch.device, what: str, *, must: bool, priority: int = 0) -> None:
        """`must`: what cannot be captured is an error; otherwise it is never tried again."""
        self.enabled = device.type == "cuda"
        self._what, self._must = what, must
        stream: Any = torch.cuda.Stream
        self._stream: Any = stream(device, priority) if self.enabled else None
        self.clear()

    def clear(self) -> None:
        """Forget them all: the places they read from or write to are about to move."""
        if self.enabled:
            torch.cuda.synchronize()
            self._memory = torch.cuda.graph_pool_handle()  # dies with the graphs
        self._made: dict[Hashable, tuple[Any, Tensor]] = {}

    def run(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        """What `compute` returns, from the second time of a key on without calling it."""
        made = self._made.get(key) or self._capture(compute)
        if made is None:
            return compute()
        self._made[key] = made
        graph, out = made
        graph.replay()
        return out

    def _capture(self, compute: Callable[[], Tensor]) -> tuple[Any, Tensor] | None:
        Graphs.captures += 1
        compute()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, **ALONE):
                out = compute()
        except RuntimeError:
            if self._must:
                raise
            logger.warning("%s cannot be captured", self._what, exc_info=True)
            self.enabled = False
            self._settle()
            return None
        return graph, out

    def _settle(self) -> None:
        """A capture that fails leaves the device's random numbers waiting for its end, and whoever
        draws some is refused; the end of another one does as well."""
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream, **ALONE):
            torch.zeros(1, device=self._stream.device)

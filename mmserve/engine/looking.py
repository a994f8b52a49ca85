"""Images that one rank looks at for another: vision is shared out by image, not by heads.

Owns the two ends of a pipe that pictures go through one way and features the other, one at a time.
Knows nothing of steps. Both ends are the same program's.
"""

from __future__ import annotations

import pickle
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from mmserve.model.adapter import Features
from mmserve.request import ImageInput


def answer(pipe: Any, runner: Any, turns: AbstractContextManager[Any]) -> None:
    """Look at images until the other end is gone, each in a turn of its own."""
    while True:
        try:
            image, pixels = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            with turns:
                found: Any = runner.look(image, pixels)
        except Exception as error:
            found = RuntimeError(f"another rank: {type(error).__name__}: {error}")
        pipe.send_bytes(pickle.dumps(found))


class Other:
    """The other end. Asks on a thread of its own, so that nobody waits who need not."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="looks")

    def look(self, image: ImageInput, pixels: Any, device: torch.device) -> Future[Features]:
        """On `device`, for any stream."""
        bare = replace(image, data=b"", pixels=None, inputs=None)
        return self._asking.submit(self._ask, bare, pixels, device)

    def _ask(self, image: ImageInput, pixels: Any, device: torch.device) -> Features:
        self._pipe.send_bytes(pickle.dumps((image, pixels)))
        found = pickle.loads(self._pipe.recv_bytes())
        if isinstance(found, Exception):
            raise found
        features: Features = found
        return features.on(device)

    def close(self) -> None:
        self._asking.shutdown(wait=False, cancel_futures=True)
        self._pipe.close()

"""Joules of the board: read from its own counter and shared out over what the steps computed.

Owns the reader (NVML, where it is installed) and `EnergyMeter`. Knows nothing of tensors, queues or
metrics. The counter of a board moves every 20 to 100 ms, which is many decode steps, and a call
takes some milliseconds itself; so a thread of its own reads it, work is collected, and each
movement is shared out over all of it.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

READ_EVERY_S = 0.05
MOST_WORK = 100_000  # kept while a counter stands still

logger = logging.getLogger(__name__)

Reader = Callable[[], float]  # joules since the driver was loaded


class Part(enum.Enum):
    """What joules are spent on."""

    DECODE = "decode"  # counted in tokens generated
    PROMPT = "prompt"  # text tokens of prompts
    IMAGE_MISS = "image_miss"  # images encoded
    IMAGE_HIT = "image_hit"  # images found
    IDLE = "idle"  # nothing to do


class Work(NamedTuple):
    """Units of one part that a step computed, and for whom (None: for nobody in particular).

    Of images that were computed also their visual tokens, and the numbers the tower was given.
    """

    part: Part
    units: int
    request_id: str | None = None
    visual_tokens: int = 0
    pixel_values: int = 0


@dataclass(frozen=True)
class Weights:
    """What an image counts beside one text token of the same step, by arithmetic.

    A miss: (tower FLOPs + 2 P n) / 2 P for P decoder weights and n visual tokens. A hit: what the
    prompt's q text tokens spend reading it, 4 L H D n q / 2 P for L layers of H heads of D.
    Where images differ in size, a miss is counted by what it is made of instead.
    """

    image_miss: float = 0.0
    image_hit: float = 0.0
    visual_token: float = 0.0  # of a miss
    pixel_value: float = 0.0

    def of(self, work: Work) -> float:
        if work.part is Part.IMAGE_MISS:
            size = work.visual_tokens * self.visual_token + work.pixel_values * self.pixel_value
            return work.units * self.image_miss + size
        if work.part is Part.IMAGE_HIT:
            return work.units * self.image_hit
        return float(work.units)


def board_reader(uuid: str) -> Reader | None:
    """A reader of the board with this UUID (`GPU-…`).

    None where NVML, its Python package or the board's counter (Volta or newer) is missing.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        board = (
            pynvml.nvmlDeviceGetHandleByUUID(uuid) if uuid else pynvml.nvmlDeviceGetHandleByIndex(0)
        )
        pynvml.nvmlDeviceGetTotalEnergyConsumption(board)
    except pynvml.NVMLError:
        return None
    return lambda: float(pynvml.nvmlDeviceGetTotalEnergyConsumption(board)) / 1e3


class Background:
    """A reader whose calls are free: a thread of its own asks the slow one now and then.

    The thread ends with this object.
    """

    def __init__(self, read: Reader, every_s: float = READ_EVERY_S) -> None:
        self.joules = read()
        arguments = (weakref.ref(self), read, every_s)
        threading.Thread(target=_keep_reading, args=arguments, name="energy", daemon=True).start()

    def __call__(self) -> float:
        return self.joules


def _keep_reading(holder: weakref.ref[Background], read: Reader, every_s: float) -> None:
    while True:
        time.sleep(every_s)
        try:
            joules = read()
        except Exception:  # a board that is gone: the last value stays
            logger.exception("the board's energy counter cannot be read any more")
            return
        held = holder()
        if held is None:
            return
        held.joules = joules
        del held


class EnergyMeter:
    """Shares the board's joules over parts and requests in proportion to weighted work.

    Invariant: the parts' joules sum to what the counter has moved since the meter was made, less
    the movement since the last reading that shared it out. Without a reader every call is free and
    every figure zero.
    """

    def __init__(
        self,
        read: Reader | None,
        weights: Weights,
        *,
        on_spend: Callable[[Part, float], object] = lambda part, joules: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_spend` is told of all joules as they are shared out."""
        self.joules = dict.fromkeys(Part, 0.0)
        self.counts = dict.fromkeys(Part, 0)  # units of work whose joules are known
        self._read = read
        self._weights = weights
        self._on_spend = on_spend
        self._clock = clock
        self._last = read() if read else 0.0
        self._due = clock()
        self._work: list[Work] = []  # since the counter last moved
        self._requests: dict[str, float] = {}  # joules
        self._rate = 0.0  # joules of one unit of weight, at the last movement

    @property
    def enabled(self) -> bool:
        """Whether there is a counter."""
        return self._read is not None

    def share(self, work: Iterable[Work]) -> None:
        """Record what one step computed; share out what the counter has moved, if it has."""
        if self._read is None:
            return
        self._work += work
        if len(self._work) > MOST_WORK:
            self._work = []
        if self._work and self._clock() >= self._due:
            self._spend()

    def idle(self) -> None:
        """Say that nothing has run since the last step: call before the first step after a pause.

        What has moved belongs to the last steps first, if they are still unpaid.
        """
        if self._read is None:
            return
        moved = self._moved()
        unpaid = min(moved, self._rate * self._pending())
        if unpaid > 0:
            self._divide(unpaid)
        self._add(Part.IDLE, moved - unpaid)
        self._work = []

    def close(self, request_id: str) -> float:
        """The joules of a request that has ended; what is still unpaid counts at the last rate."""
        pending = sum(self._weights.of(w) for w in self._work if w.request_id == request_id)
        self._work = [
            w._replace(request_id=None) if w.request_id == request_id else w for w in self._work
        ]
        return self._requests.pop(request_id, 0.0) + self._rate * pending

    def per_unit(self, part: Part) -> float | None:
        """Joules of a token or an image; None before the first reading."""
        return self.joules[part] / self.counts[part] if self.counts[part] else None

    def _spend(self) -> None:
        moved = self._moved()
        if moved <= 0:
            return
        self._due = self._clock() + READ_EVERY_S
        weight = self._pending()
        if weight > 0:
            self._rate = moved / weight
            self._divide(moved)
        else:
            self._add(Part.IDLE, moved)
        self._work = []

    def _moved(self) -> float:
        assert self._read is not None
        now = self._read()
        moved, self._last = now - self._last, now
        return max(moved, 0.0)  # a driver that was loaded again starts from zero

    def _pending(self) -> float:
        return sum(map(self._weights.of, self._work))

    def _divide(self, joules: float) -> None:
        rate = joules / self._pending()
        for work in self._work:
            part = rate * self._weights.of(work)
            self._add(work.part, part)
            self.counts[work.part] += work.units
            if work.request_id is not None:
                before = self._requests.get(work.request_id, 0.0)
                self._requests[work.request_id] = before + part

    def _add(self, part: Part, joules: float) -> None:
        self.joules[part] += joules
        self._on_spend(part, joules)

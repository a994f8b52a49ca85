"""Faults made on purpose: named points in the code that fail where somebody has armed them.

Owns the points' names, the kinds of faults and when each strikes. Nothing on the wire can arm one:
the command line reads them from the environment, tests pass them in the configuration. Knows
nothing of what lies behind a point; one that is not armed costs a look into an empty dictionary.
"""

from __future__ import annotations

import errno
import sqlite3
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

POINTS = {
    "engine.command": "what the event loop tells the engine's thread, before it is done",
    "engine.launch": "a step, before the model runs",
    "engine.recover": "the clearing up after a step that failed",
    "device.probe": "the look whether a device still computes after a fault",
    "journal.commit": "a commit of the database",
    "blob.write": "the bytes of a picture or file, before they are written",
    "tier.write": "an object of KV on its way to disk or object store",
    "tier.read": "an object of KV on its way up",
}
LONGEST_HANG_S = 3600.0


class InjectedFault(RuntimeError):
    """Made on purpose."""


def _out_of_memory() -> Exception:
    import torch  # only where it is asked for

    return torch.OutOfMemoryError("CUDA out of memory (injected)")


def _device_assert() -> Exception:
    import torch

    torch.ones(1, device="cuda")[torch.ones(1, dtype=torch.long, device="cuda")].item()
    return InjectedFault("the device took an index that is out of range")


KINDS: Mapping[str, Callable[[], Exception]] = {
    "error": lambda: InjectedFault("injected"),
    "oom": _out_of_memory,
    "disk_full": lambda: OSError(errno.ENOSPC, "No space left on device"),
    "gone": lambda: OSError(errno.EIO, "Input/output error"),
    "locked": lambda: sqlite3.OperationalError("database is locked"),
    "device_assert": _device_assert,  # a real one: CUDA computes nothing more in this process
}
HANG = "hang"  # does not raise, but stands still


@dataclass
class _Armed:
    kind: str
    skip: int  # passes before it strikes
    times: int


class Faults:
    """`armed`: such as `engine.launch=oom@3*2,journal.commit=locked`: from the third pass on,
    twice. Without `@` from the first one on, without `*` once. Raises ValueError for what is
    unknown."""

    def __init__(self, armed: str = "") -> None:
        self._armed: dict[str, _Armed] = {}
        self._told: list[str] = []
        self._lock = threading.Lock()
        self._released = threading.Event()
        for part in filter(None, map(str.strip, armed.split(","))):
            self.arm(part)

    def __bool__(self) -> bool:
        return bool(self._armed)

    def __reduce__(self) -> tuple[type[Faults], tuple[str]]:
        """Another process has its own, armed as these were and not yet passed."""
        return Faults, (",".join(self._told),)

    def arm(self, part: str) -> None:
        point, _, how = part.partition("=")
        how, _, times = how.partition("*")
        kind, _, first = how.partition("@")
        if point not in POINTS or kind not in (*KINDS, HANG):
            raise ValueError(
                f"no fault {part!r}; points: {', '.join(POINTS)}; "
                f"kinds: {', '.join((*KINDS, HANG))}"
            )
        self._armed[point] = _Armed(kind, int(first or 1) - 1, int(times or 1))
        self._told.append(part)

    def at(self, point: str) -> None:
        """The code has come to a point. Raises what is armed there. On any thread."""
        if point in self._armed:
            self._strike(point)

    def _strike(self, point: str) -> None:
        with self._lock:
            armed = self._armed[point]
            armed.skip -= 1
            if armed.skip >= 0 or armed.times == 0:
                return
            armed.times -= 1
        if armed.kind == HANG:
            self._released.wait(LONGEST_HANG_S)
            return
        raise KINDS[armed.kind]()

    def release(self) -> None:
        """Let go on what stands still."""
        self._released.set()


NO_FAULTS = Faults()

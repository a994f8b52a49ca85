"""What a deployment is to be: how many replicas, with which flags, where they listen.

Owns the form in which it travels to the processes that make it so. Knows nothing of Ray.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """`flags`: of `mmserve serve`. `max_replicas`: None where their number stays. `near`: all are
    on one machine, which nobody else can reach. `gpus`: of one replica. `admin_key`: the
    router's own, where keys are asked for."""

    flags: tuple[str, ...] = ()
    replicas: int = 1
    max_replicas: int | None = None
    near: bool = True
    gpus: int = 0
    drain_s: float = 10.0
    admin_key: str | None = None

    def serve_flags(self, name: str, host: str) -> tuple[str, ...]:
        """Of one replica; of a flag given twice the last counts."""
        return (*self.flags, "--host", host, "--port", "0", "--replica", name)

"""Launches that begin while the one before ends (CUDA's programmatic dependent launch).

Owns the one question whether the device has them. A kernel that takes CHAINED lets its successor
begin at once and waits itself, before it reads or writes anything a predecessor may write or read,
until all of them have ended: what stands before that wait hides the launch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def _has_chains(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def chained(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel with the parameter CHAINED."""
    if _has_chains(device):
        return {"CHAINED": True, "launch_pdl": True}
    return {"CHAINED": False}

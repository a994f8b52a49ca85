"""What a device can do with our Triton kernels, and launches that begin while the one before ends.

Owns both questions; imports no Triton. The launches are CUDA's programmatic dependent ones: a
kernel that takes CHAINED lets its successor begin at once and waits itself, before it reads or
writes anything a predecessor may write or read, until all of them have ended: what stands before
that wait hides the launch.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether Triton is installed and the GPU has what the kernels need (bfloat16: Ampere on)."""
    installed = importlib.util.find_spec("triton") is not None
    return (
        installed
        and device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


@functools.cache
def _has_chains(device: torch.device) -> bool:
    return has_kernels(device) and torch.cuda.get_device_capability(device) >= (9, 0)


def assembly(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel with the parameter ASSEMBLY: whether it may use a GPU's own
    instructions, which Triton's interpreter does not know."""
    return {"ASSEMBLY": has_kernels(device)}


def chained(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel with the parameter CHAINED."""
    if _has_chains(device):
        return {"CHAINED": True, "launch_pdl": True}
    return {"CHAINED": False}

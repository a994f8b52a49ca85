"""What a machine can do at best, by name or as measured, and how much of it mmserve reaches.

Owns the table of machines and of efficiencies, each with its source. Knows nothing of models.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GB = 1e9


@dataclass(frozen=True)
class Efficiency:
    """What stands between a ceiling and a step. A step takes as long as the device's work or the
    host's, whichever is longer: they go on beside each other."""

    read: float  # of the copy rate, by the products and attention of a decode step
    prefill: float  # of the matrix rate
    vision: float  # of the matrix rate, by a vision tower
    layer_s: float  # a layer's launches and small kernels, whatever is read
    row_s: float  # a sequence more in a step, on the device
    host_s: float  # a step's host work
    host_row_s: float  # a sequence more in a step, on the host
    first_s: float  # from a request's arrival to its first step, and its first token's way back
    known_s: float  # a token more whose KV is known and that the first token's step looks at


# One H200, docs/performance.md: `read`, `layer_s` and `row_s` from decoding 1 and 64 sequences by
# mistral-7b and qwen2.5-7b (which come to 85 % and 80 % of the bound), `prefill` from 8,192 tokens,
# `vision` from 5 new images, `first_s` from 32 tokens, `known_s` from 5 known images of 1,225,
# the host's from the default model.
GPU = Efficiency(0.98, 0.76, 0.42, 18e-6, 9e-6, 0.74e-3, 26e-6, 1.9e-3, 0.28e-6)
# Two cores of a Xeon, docs/performance.md: 1 and 8 streams of the default model in 8 bits. Its
# arithmetic has not been set against a ceiling there; the GPU's shares stand in.
CPU = Efficiency(0.37, 0.76, 0.42, 0.0, 0.9e-3, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Hardware:
    name: str
    bytes_per_s: float  # read and written by a copy
    flops_per_s: float  # of a product in the dtype weights have, dense
    memory: float  # bytes
    source: str
    on_gpu: bool = True

    @property
    def efficiency(self) -> Efficiency:
        return GPU if self.on_gpu else CPU


# Of the H200's data sheet (4.8 TB/s, 989 TFLOP/s) a copy and a product reach these shares; so will
# its relatives.
COPY_SHARE, MATRIX_SHARE = 4.28 / 4.8, 794 / 989
SHEETS = {  # TB/s, dense bfloat16 TFLOP/s, GB
    "h100": (3.35, 989, 80),
    "a100-80g": (2.039, 312, 80),
    "l40s": (0.864, 362, 48),
    "rtx4090": (1.008, 165, 24),
    "l4": (0.3, 121, 24),
}
MACHINES = {
    "h200": Hardware("h200", 4.28e12, 794e12, 141 * GB, "measured"),
    **{
        name: Hardware(
            name,
            rate * 1e12 * COPY_SHARE,
            flops * 1e12 * MATRIX_SHARE,
            memory * GB,
            "data sheet, at the shares of it measured on an H200",
        )
        for name, (rate, flops, memory) in SHEETS.items()
    },
}
CPU_NAME = "cpu"
NAMES = (*MACHINES, CPU_NAME)


def find_hardware(
    name: str,
    *,
    bytes_per_s: float | None = None,
    flops_per_s: float | None = None,
    memory: float | None = None,
) -> Hardware:
    """A machine by name, or by the JSON that `mmserve bench engine`, `kernels` or `families` wrote;
    rates and memory that are given go first. Raises ValueError."""
    given = {"bytes_per_s": bytes_per_s, "flops_per_s": flops_per_s, "memory": memory}
    values: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if name in MACHINES:
        machine = dataclasses.replace(MACHINES[name], **values)
        return dataclasses.replace(machine, source="given") if values else machine
    on_gpu = name != CPU_NAME
    if on_gpu:
        path = Path(name)
        if not path.is_file():
            raise ValueError(f"hardware {name!r} is no file and none of {', '.join(NAMES)}")
        measured, on_gpu = _measured(path)
        values = {**measured, **values}
    missing = [key for key in given if key not in values]
    if missing:
        flags = {"bytes_per_s": "--copy-rate", "flops_per_s": "--matrix-rate"}
        wanted = ", ".join(flags.get(key, "--memory") for key in missing)
        raise ValueError(f"hardware {name} needs {wanted}")
    source = "given" if name == CPU_NAME else "measured"
    return Hardware(name, source=source, on_gpu=on_gpu, **values)


def _measured(path: Path) -> tuple[dict[str, float], bool]:
    """Rates in a benchmark's JSON, and whether a GPU was measured."""
    try:
        data = json.loads(path.read_text())
        ceilings: Mapping[str, Any] = data["ceilings"]
        rates = {key: float(ceilings[key]) for key in ("bytes_per_s", "flops_per_s")}
        device = str(data["facts"]["device"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is no JSON of mmserve bench with ceilings in it") from None
    return rates, "(family" not in device  # as mmserve.bench.machine writes a CPU's name

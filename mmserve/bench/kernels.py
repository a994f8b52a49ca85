"""`mmserve bench kernels`: each GPU kernel alone, beside the ceilings of the same run.

Owns the order of events. Knows nothing of what a case measures or of flags' spelling.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import triton

from mmserve.bench.ceilings import Probe, measure_ceilings, usual_dtype
from mmserve.bench.kernel_cases import KernelCases, Plan
from mmserve.bench.machine import facts
from mmserve.bench.suite import SuiteReport, record, render, run_cases
from mmserve.model.loader import resolve_device


@dataclass(frozen=True)
class KernelSuite:
    device: str = "auto"
    budget_s: float = 300.0
    json: Path | None = None
    command: str = "mmserve bench kernels"
    seed: int = 0
    plan: Plan = field(default_factory=Plan)
    probe: Probe | None = None


@torch.inference_mode()
def bench_kernels(suite: KernelSuite) -> SuiteReport:
    """Run, print, and write the JSON. Raises ValueError where Triton has nothing to run on."""
    deadline = time.monotonic() + suite.budget_s
    device = resolve_device(suite.device)
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise ValueError("the kernels suite needs a GPU")
    torch.manual_seed(suite.seed)
    dtype = usual_dtype(device)
    ceilings = measure_ceilings(device, dtype, suite.probe)
    cases = KernelCases(suite.plan, device, dtype, ceilings)
    report = SuiteReport(
        command=suite.command,
        suite="kernels",
        model=f"random {dtype}".replace("torch.", ""),
        facts=facts(device),
        ceilings=ceilings,
        sizes={"tokens a page": suite.plan.page, "processors": cases.processors},
        lines=(),
    )
    report = record(report, run_cases(cases.all(), deadline), suite.json)
    print(render(report))
    return report

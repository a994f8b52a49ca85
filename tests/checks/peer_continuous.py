"""transformers' continuous batching on a shape with random weights: the other peer.

Run: python tests/checks/peer_continuous.py [--shape mistral-7b] [--device cuda] [--json FILE]

A process of its own, because it takes most of a GPU's memory and keeps it.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

import torch

from mmserve.bench.ceilings import measure_ceilings, usual_dtype
from mmserve.bench.dims import SHAPES
from mmserve.bench.machine import facts
from mmserve.bench.peer_cases import PeerCases
from mmserve.bench.shapes import build_shape
from mmserve.bench.suite import SuiteReport, record, render, run_cases


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=tuple(SHAPES), default="mistral-7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--budget-seconds", type=float, default=60.0)
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    dtype = usual_dtype(device)
    ceilings = measure_ceilings(device, dtype)
    loaded = build_shape(SHAPES[args.shape], device, dtype)
    command = shlex.join(["python", *sys.argv])
    report = SuiteReport(command, "peer", loaded.spec.name, facts(device), ceilings, {}, ())
    deadline = time.monotonic() + args.budget_seconds
    cases = PeerCases(loaded, ((64, 1024),)).continuous()
    print(render(record(report, run_cases(cases, deadline), args.json)))


if __name__ == "__main__":
    main()

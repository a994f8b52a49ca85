"""All suites on one GPU within a given time: kernels, then the engine on every shape.

Run: python tests/checks/gpu_bench.py --out DIR [--seconds 480] [--device cuda] [--only NAME …]

Each suite is a process of its own, so that one that dies costs its own figures only. DIR gets one
JSON and one log a suite, and `gpu_bench.json` and `gpu_bench.md` with everything.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from mmserve.bench.suite import markdown, read_report

ROOT = Path(__file__).parents[2]
CONTINUOUS = str(Path(__file__).with_name("peer_continuous.py"))
SERVER_TTFT = str(Path(__file__).with_name("server_ttft.py"))

START_S = 25.0  # importing the libraries and making the weights
GRACE_S = 20.0  # the case that runs when the budget ends


@dataclass(frozen=True)
class Part:
    """One suite: Python's words for it, and its share of the time left when its turn comes."""

    name: str
    words: tuple[str, ...]
    weight: float


def parts() -> list[Part]:
    shapes = {"mistral-7b": 3.0, "idefics2-8b": 2.5, "qwen2.5-7b": 2.0, "llava-7b": 2.0}
    peer = {"mistral-7b": ("--peer", "transformers")}
    bench = ("-m", "mmserve", "bench")
    out = [
        Part(name, (*bench, "engine", "--shape", name, *peer.get(name, ())), weight)
        for name, weight in {**shapes, "default": 1.5}.items()
    ]
    out.insert(2, Part("server", (SERVER_TTFT, "--shape", "idefics2-8b"), 1.0))
    out.append(Part("continuous", (CONTINUOUS, "--shape", "mistral-7b"), 1.0))
    if importlib.util.find_spec("mmserve.bench.kernels") is not None:
        out.insert(0, Part("kernels", (*bench, "kernels"), 2.0))
    return out


def budget(remaining: float, weight: float, weights: float) -> float:
    """Seconds of measuring for the next part: its share, less starting and ending."""
    return max(remaining * weight / weights - START_S - GRACE_S, 10.0)


def run(part: Part, device: str, out: Path, seconds: float) -> str | None:
    """What went wrong, if anything; the suite's JSON holds whatever it measured until then."""
    words = [*part.words, "--device", device, "--budget-seconds", str(int(seconds))]
    words += ["--json", str(out / f"{part.name}.json")]
    command = [sys.executable, *words]
    limit = seconds + START_S + GRACE_S
    with (out / f"{part.name}.log").open("w") as log:
        try:
            status = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, timeout=limit, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return f"stopped after {limit:.0f} s"
    return f"ended with status {status}" if status else None


def run_all(chosen: Sequence[Part], device: str, out: Path, seconds: float) -> str:
    """The page of all suites; writes it and the JSON after each of them."""
    ends = time.monotonic() + seconds
    faults: dict[str, str] = {}
    page = ""
    for i, part in enumerate(chosen):
        weights = sum(p.weight for p in chosen[i:])
        share = budget(ends - time.monotonic(), part.weight, weights)
        fault = run(part, device, out, share)
        if fault:
            faults[part.name] = fault
        print(f"{part.name}: {fault or 'done'}", flush=True)
        page = collect(chosen[: i + 1], out, faults)
    return page


def collect(done: Sequence[Part], out: Path, faults: dict[str, str]) -> str:
    sections, data = [], {}
    for part in done:
        file = out / f"{part.name}.json"
        if file.is_file():
            data[part.name] = json.loads(file.read_text())
            sections.append(markdown(read_report(file)))
        if part.name in faults:
            sections.append(f"{part.name} {faults[part.name]}; see its log.\n")
    page = "\n".join(sections)
    (out / "gpu_bench.json").write_text(json.dumps({"suites": data, "faults": faults}, indent=1))
    (out / "gpu_bench.md").write_text(page)
    return page


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", choices=[p.name for p in parts()])
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = [p for p in parts() if not args.only or p.name in args.only]
    page = run_all(chosen, args.device, args.out, args.seconds)
    print(page)
    return 0 if page else 1


if __name__ == "__main__":
    sys.exit(main())

"""All suites on one GPU within a given time: the engine on every shape, public families, kernels.

Run: python tests/checks/gpu_bench.py --out DIR [--seconds 480] [--device cuda] [--only NAME …]

Each suite is a process of its own, so that one that dies costs its own figures only. DIR gets one
JSON and one log a suite, and `gpu_bench.json` and `gpu_bench.md` with everything.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from mmserve.bench.engine_cases import WINDOW, Plan
from mmserve.bench.suite import SuiteReport, markdown, number, read_report

ROOT = Path(__file__).parents[2]
CONTINUOUS = str(Path(__file__).with_name("peer_continuous.py"))
SERVER_TTFT = str(Path(__file__).with_name("server_ttft.py"))

# Importing the libraries, making the weights, compiling kernels on a machine that has none yet and
# capturing steps; the seconds that a suite is given begin behind it.
START_S = 30.0
GRACE_S = 5.0  # the case that runs when the budget ends
LATE_S = 60.0  # behind its budget and its start: a suite that has not ended then never will
IN_CONTEXT = "-prefix"  # ends the name of a part whose images see the text before them


@dataclass(frozen=True)
class Part:
    """One suite: Python's words for it, and its share of the time left when its turn comes."""

    name: str
    words: tuple[str, ...]
    weight: float  # about the seconds it takes whole, on an H200


def parts() -> list[Part]:
    """What matters most comes first. The text of idefics2-8b is mistral-7b's, that of
    qwen2.5-vl-7b is qwen2.5-7b's."""
    engine, prefix = ("-m", "mmserve", "bench", "engine", "--shape"), ("--vision-mode", "prefix")
    images = ("--case", f"TTFT {Plan().view} images")
    return [
        Part("idefics2-8b", (*engine, "idefics2-8b", "--peer", "transformers"), 85),
        Part("qwen2.5-vl-7b", (*engine, "qwen2.5-vl-7b"), 80),
        Part("server", (SERVER_TTFT, "--shape", "idefics2-8b"), 60),
        Part(f"idefics2-8b{IN_CONTEXT}", (*engine, "idefics2-8b", *prefix, *images), 42),
        Part(f"qwen2.5-vl-7b{IN_CONTEXT}", (*engine, "qwen2.5-vl-7b", *prefix, *images), 45),
        Part("families", ("-m", "mmserve", "bench", "families"), 110),
        Part("kernels", ("-m", "mmserve", "bench", "kernels"), 70),
        Part("llava-7b", (*engine, "llava-7b", "--case", "the same"), 50),
        Part("default", (*engine, "default"), 45),
        Part("continuous", (CONTINUOUS, "--shape", "mistral-7b"), 50),
    ]


def budget(remaining: float, weight: float, weights: float) -> float:
    """Seconds of measuring for the next part: its share, less starting and ending."""
    return max(remaining * weight / weights - START_S - GRACE_S, 10.0)


def sooner(reports: Mapping[str, SuiteReport]) -> list[str]:
    """How much sooner a window of images that slides is answered where an image is isolated."""
    out = []
    for name, isolated in reports.items():
        in_context = reports.get(name + IN_CONTEXT)
        ms = [_window_ms(report) for report in (isolated, in_context) if report]
        if len(ms) == 2 and ms[0] and ms[1]:
            out.append(
                f"Sliding images, {name}: isolated is {number(ms[1] / ms[0])} x sooner than prefix "
                f"({number(ms[0])} against {number(ms[1])} ms)"
            )
    return out


def _window_ms(report: SuiteReport) -> float | None:
    found = (line.value for line in report.lines if line.case.startswith(WINDOW))
    return next(found, None)


def run(part: Part, device: str, out: Path, seconds: float) -> str | None:
    """What went wrong, if anything; the suite's JSON holds whatever it measured until then."""
    words = [*part.words, "--device", device, "--budget-seconds", str(int(seconds))]
    words += ["--json", str(out / f"{part.name}.json")]
    command = [sys.executable, *words]
    limit = START_S + seconds + LATE_S
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
    reports: dict[str, SuiteReport] = {}
    for part in done:
        file = out / f"{part.name}.json"
        if file.is_file():
            data[part.name] = json.loads(file.read_text())
            reports[part.name] = read_report(file)
            sections.append(markdown(reports[part.name]))
        if part.name in faults:
            sections.append(f"{part.name} {faults[part.name]}; see its log.\n")
    page = "\n".join([*sections, *sooner(reports)])
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

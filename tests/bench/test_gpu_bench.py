"""The script over all suites: time is shared out, and what a dead suite measured is kept."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))

from mmserve.__main__ import build_parser
from mmserve.bench.suite import Line, SuiteReport
from tests.bench.test_suite import REPORT, good
from tests.checks import gpu_bench
from tests.checks.gpu_bench import Part


def test_every_part_is_a_command_the_program_knows() -> None:
    suites = [part for part in gpu_bench.parts() if part.words[0] == "-m"]
    for part in suites:
        assert part.words[:2] == ("-m", "mmserve")
        args = build_parser().parse_args(list(part.words[2:]))
        assert args.workload in ("engine", "families", "kernels")
    scripts = {part.words[0] for part in gpu_bench.parts()} - {"-m"}
    assert scripts == {gpu_bench.SERVER_TTFT, gpu_bench.CONTINUOUS}
    assert all(Path(script).is_file() for script in scripts)


def test_all_time_that_is_left_is_shared_out() -> None:
    overhead = gpu_bench.START_S + gpu_bench.GRACE_S
    assert gpu_bench.budget(480, 1, 4) == 120 - overhead
    assert gpu_bench.budget(480, 4, 4) == 480 - overhead
    assert gpu_bench.budget(5, 1, 1) == 10  # enough to say what is missing


def test_a_sliding_window_is_compared_between_the_modes_of_a_shape() -> None:
    def report(ms: float | None) -> SuiteReport:
        line = Line("TTFT window of 5, 1 new", ms, "ms")
        return replace(REPORT, lines=(*good(), line))

    both = {"a": report(80.0), "a-prefix": report(200.0), "b": report(1.0)}
    (said,) = gpu_bench.sooner(both)
    assert "a: isolated is 2.50 x sooner" in said and "80.00 against 200.0 ms" in said
    assert gpu_bench.sooner({"a": report(80.0), "a-prefix": report(None)}) == []
    names = {part.name for part in gpu_bench.parts()}
    shapes = {name.removesuffix("-prefix") for name in names if name.endswith("-prefix")}
    assert shapes == {"idefics2-8b", "qwen2.5-vl-7b"} <= names


def test_a_suite_that_dies_leaves_its_lines_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(part: Part, device: str, out: Path, seconds: float) -> str | None:
        for line in good():
            report = REPORT.__class__(**{**vars(REPORT), "lines": (line,), "model": part.name})
            report.write(out / f"{part.name}.json")
        return "stopped after 60 s" if part.name == "first" else None

    monkeypatch.setattr(gpu_bench, "run", run)
    chosen = [Part("first", ("engine",), 1), Part("second", ("engine",), 1)]
    page = gpu_bench.run_all(chosen, "cpu", tmp_path, 100)
    assert "first stopped after 60 s" in page
    assert page.count("| good | 80.00 |") == 2
    data = json.loads((tmp_path / "gpu_bench.json").read_text())
    assert list(data["suites"]) == ["first", "second"]
    assert (tmp_path / "gpu_bench.md").read_text() == page

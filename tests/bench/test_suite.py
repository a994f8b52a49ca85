"""Suites: the budget, cases that fail, and which way is better."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mmserve.bench import suite
from mmserve.bench.ceilings import Ceilings
from mmserve.bench.machine import Facts
from mmserve.bench.suite import (
    Case,
    Line,
    SuiteReport,
    markdown,
    read_report,
    record,
    render,
    run_cases,
)

FACTS = Facts("abc", "a board", 2, 1, "3.11", "2.11", "5.17", 0.5)
REPORT = SuiteReport("cmd", "engine", "m", FACTS, Ceilings(4e12, 7e14), {"GB of weights": 14.5}, ())
NEVER = float("inf")


def good() -> list[Line]:
    return [Line("good", 80.0, "tokens/s", 100.0, {"ms a step": 12.5})]


def fails(error: Exception) -> Callable[[], Iterator[Line]]:
    def run() -> Iterator[Line]:
        yield Line("half", 1.0)
        raise error

    return run


def test_a_case_that_fails_is_a_line_and_the_next_one_runs() -> None:
    cases = [
        Case("oom", fails(torch.OutOfMemoryError("CUDA out of memory. Tried …"))),
        Case("broken", fails(ValueError("does not fit: needs 160 GB\nmore"))),
        Case("good", good),
    ]
    oom, broken, line = run_cases(cases, NEVER)
    assert (oom.case, oom.value, oom.fault) == ("oom", None, "out of memory")
    assert broken.fault == "ValueError: does not fit: needs 160 GB"
    assert line == good()[0]


def test_no_case_starts_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def slow() -> list[Line]:
        nonlocal now
        now += 50
        return good()

    monkeypatch.setattr(suite, "time", SimpleNamespace(monotonic=lambda: now))
    cases = [Case("first", slow), Case("second", slow)]
    first, second = run_cases(cases, 20)
    assert first.value == 80
    assert second.fault == "not started: no time left"


@pytest.mark.parametrize(
    ("unit", "value", "bound", "share"),
    [("tokens/s", 80, 100, 0.8), ("ms", 8, 4, 0.5), ("J", 0.1, 0.05, 0.5), ("ms", 8, None, None)],
)
def test_the_share_of_a_bound_is_one_at_best(
    unit: str, value: float, bound: float | None, share: float | None
) -> None:
    assert Line("x", value, unit, bound).share == share


def test_table_page_and_json_tell_the_same(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    late = Line("late", None, fault="not started: no time left")
    report = record(REPORT, [*good(), late], path)
    for text in (render(report), markdown(report)):
        for part in ("80.00", "100.0", "80 %", "12.50 ms a step", late.fault, "4.000 TB/s", "cmd"):
            assert part is not None and part in text
    assert read_report(path) == report
    data = json.loads(path.read_text())
    assert [line["share"] for line in data["lines"]] == [0.8, None]
    assert data["ceilings"]["flops_per_s"] == 7e14


def test_lines_are_on_disk_before_the_next_case_runs(tmp_path: Path) -> None:
    path = tmp_path / "out.json"

    def lines() -> Iterator[Line]:
        yield from good()
        assert len(json.loads(path.read_text())["lines"]) == 1
        yield from good()

    assert len(record(REPORT, lines(), path).lines) == 2

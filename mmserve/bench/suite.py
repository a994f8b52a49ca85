"""A suite: named cases run in order against the clock, and what they found as a table and JSON.

Owns `Line`, the budget, and the rule that no case ends the run. Knows nothing of what is measured.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from mmserve.bench.ceilings import Ceilings
from mmserve.bench.machine import Facts
from mmserve.bench.report import table

logger = logging.getLogger(__name__)

LOWER_IS_BETTER = ("ms", "J")


@dataclass(frozen=True)
class Line:
    """One figure of one case beside the bound physics sets, or the fault that prevented it."""

    case: str
    value: float | None
    unit: str = ""
    bound: float | None = None  # in the same unit
    figures: Mapping[str, float] = field(default_factory=dict)  # others; names carry units
    fault: str | None = None

    @property
    def share(self) -> float | None:
        """Of the bound, 1 at best."""
        if self.value is None or self.bound is None:
            return None
        lower = self.unit in LOWER_IS_BETTER
        return self.bound / self.value if lower else self.value / self.bound


class Case(NamedTuple):
    name: str
    run: Callable[[], Iterable[Line]]


@dataclass(frozen=True)
class SuiteReport:
    command: str
    suite: str
    model: str
    facts: Facts
    ceilings: Ceilings
    sizes: Mapping[str, float]  # of the model; names carry units
    lines: tuple[Line, ...]

    def to_json(self) -> str:
        data = dataclasses.asdict(self)
        data["lines"] = [dataclasses.asdict(line) | {"share": line.share} for line in self.lines]
        return json.dumps(data, indent=2, ensure_ascii=False)

    def write(self, path: Path) -> None:
        path.write_text(self.to_json() + "\n")


def read_report(path: Path) -> SuiteReport:
    """What `SuiteReport.write` wrote."""
    data = json.loads(path.read_text())
    lines = tuple(
        Line(**{name: value for name, value in line.items() if name != "share"})
        for line in data["lines"]
    )
    parts = {"facts": Facts(**data["facts"]), "ceilings": Ceilings(**data["ceilings"])}
    return SuiteReport(**{**data, **parts, "lines": lines})


def run_cases(cases: Iterable[Case], deadline: float) -> Iterator[Line]:
    """The lines of all cases; `deadline` in seconds of `time.monotonic`.

    A case that fails or comes too late gives one line that says so.
    """
    for case in cases:
        if time.monotonic() >= deadline:
            yield Line(case.name, None, fault="not started: no time left")
            continue
        started = time.monotonic()
        yield from _attempt(case)
        seconds = time.monotonic() - started
        print(f"{case.name}: {seconds:.1f} s", file=sys.stderr, flush=True)


def record(report: SuiteReport, lines: Iterable[Line], path: Path | None) -> SuiteReport:
    """The report with all lines; written after each, so that a killed run leaves what it had."""
    for line in lines:
        report = dataclasses.replace(report, lines=(*report.lines, line))
        if path:
            report.write(path)
    return report


def _attempt(case: Case) -> list[Line]:
    try:
        return list(case.run())
    except torch.OutOfMemoryError:
        fault = "out of memory"
    except Exception as error:  # the other cases' figures are worth having
        logger.debug("case %s", case.name, exc_info=True)
        text = str(error).splitlines() or [""]
        fault = f"{type(error).__name__}: {text[0][:160]}"
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return [Line(case.name, None, fault=fault)]


HEAD = ("case", "measured", "unit", "bound", "of it", "more")


def rows(lines: Iterable[Line]) -> list[list[str]]:
    """Cells of a table, `HEAD`'s columns."""
    out = []
    for line in lines:
        more = ", ".join(f"{number(value)} {name}" for name, value in line.figures.items())
        share = "" if line.share is None else f"{100 * line.share:.0f} %"
        cells = [number(line.value), line.unit, number(line.bound), share, line.fault or more]
        out.append([line.case, *cells])
    return out


def number(value: float | None) -> str:
    """Three or four significant digits; nothing for None."""
    if value is None:
        return ""
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 4
    return f"{value:,.{digits}f}"


def render(report: SuiteReport) -> str:
    f, c = report.facts, report.ceilings
    sizes = ", ".join(f"{number(value)} {name}" for name, value in report.sizes.items())
    head = [
        f"command    {report.command}",
        f"model      {report.model}: {sizes}",
        f"commit     {f.commit}",
        f"device     {f.device}; Python {f.python}, torch {f.torch}, transformers {f.transformers}",
        f"ceilings   copy {c.bytes_per_s / 1e12:.3f} TB/s (read + write), product "
        f"{c.flops_per_s / 1e12:.1f} TFLOP/s",
    ]
    return "\n".join([*head, "", *table(HEAD, rows(report.lines), left=(0, 2, 5))])


def markdown(report: SuiteReport) -> str:
    """The same as a section of a page."""
    c = report.ceilings
    head = [
        f"### {report.suite}: {report.model}",
        "",
        f"`{report.command}`, commit {report.facts.commit}, {report.facts.device}; copy "
        f"{c.bytes_per_s / 1e12:.3f} TB/s, product {c.flops_per_s / 1e12:.1f} TFLOP/s",
        "",
    ]
    cells = [list(HEAD), ["---", "---:", "---", "---:", "---:", "---"], *rows(report.lines)]
    return "\n".join([*head, *("| " + " | ".join(row) + " |" for row in cells), ""])

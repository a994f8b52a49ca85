"""Results as JSON and as the table of the model card.

Owns their form, and the place in the card that is written anew. Measures nothing.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmserve.evaluation.rows import Row
from mmserve.evaluation.score import interval

BEGIN, END = "<!-- mmserve eval: begin -->", "<!-- mmserve eval: end -->"


class CardError(ValueError):
    """The card has no place for the table."""


@dataclass(frozen=True)
class Result:
    """How many of n answers were right, with some of those that were not."""

    row: Row
    n: int
    right: int
    wrong: tuple[tuple[str, str, str], ...]  # question, answer, what was said

    @property
    def percent(self) -> float:
        return 100 * self.right / self.n


@dataclass(frozen=True)
class Report:
    """`text` and `encode_ms` are None where they were not measured."""

    model: str
    seed: int
    results: tuple[Result, ...]
    text: dict[str, float] | None = None
    encode_ms: float | None = None

    def as_json(self) -> str:
        rows = [
            {
                "name": r.row.name,
                "n": r.n,
                "right": r.right,
                "percent": round(r.percent, 1),
                "interval": [round(bound, 1) for bound in interval(r.right, r.n)],
                "floor": r.row.floor,
                "aim": r.row.aim,
                "wrong": r.wrong,
            }
            for r in self.results
        ]
        whole: dict[str, Any] = dataclasses.asdict(self) | {"results": rows}
        return json.dumps(whole, indent=1, ensure_ascii=False)

    def table(self) -> str:
        lines = ["| Skill | Right | 95 % interval | n | Floor | Aim |", "|" + " --- |" * 6]
        for r in self.results:
            low, high = interval(r.right, r.n)
            bounds = f"{low:.1f}-{high:.1f}"
            floor, aim = (shown(value) for value in (r.row.floor, r.row.aim))
            lines.append(
                f"| {r.row.name} | {r.percent:.1f} % | {bounds} | {r.n} | {floor} | {aim} |"
            )
        if self.text:
            kl, n = f"{self.text['kl']:.4f} nats a token", int(self.text["prompts"])
            lines.append(f"| text: KL to the base model | {kl} | | {n} | 0.0156 | 0.01 |")
        if self.encode_ms is not None:
            lines.append(f"| one image, two cores | {self.encode_ms:.0f} ms | | | | 60 ms |")
        return "\n".join(lines)


def shown(percent: float | None) -> str:
    return "" if percent is None else f"{percent:g} %"


def write_card(card: Path, table: str) -> None:
    """Put the table between the card's two marks. Raises `CardError` where there are none."""
    before, begin, rest = card.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise CardError(f"{card} has no lines {BEGIN} and {END} for the table")
    card.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", "utf-8")

"""A run as a table for people and as JSON for machines.

Owns the words and units shown. Computes nothing but the ratios between figures it shows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmserve.bench.machine import Facts
from mmserve.bench.peer import Comparison, Speed
from mmserve.bench.stats import Quantiles, Summary
from mmserve.bench.workload import Shape


@dataclass(frozen=True)
class Bound:
    """The decode rate of one stream that reading weights and KV from memory allows."""

    gigabytes_per_s: float  # measured in this run
    weight_megabytes: float  # read once a step
    kv_kilobytes_per_token: float
    streams: int
    context_tokens: float  # mean while decoding
    tokens_per_s: float


@dataclass(frozen=True)
class Report:
    command: str
    workload: str
    shape: Shape
    seed: int
    model: str
    dtype: str
    facts: Facts
    bound: Bound
    phases: tuple[Summary, ...]
    comparisons: tuple[Comparison, ...]

    @property
    def warm_ratio(self) -> float | None:
        """How many times sooner the median first token comes when the images are known."""
        p50 = {s.phase: s.ttft_ms.p50 for s in self.phases}
        return p50["cold"] / p50["warm"] if {"cold", "warm"} <= p50.keys() else None

    def to_json(self) -> str:
        data = dataclasses.asdict(self) | {"warm_ratio": self.warm_ratio}
        return json.dumps(data, indent=2, ensure_ascii=False)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _quantiles(q: Quantiles) -> str:
    return f"{q.p50:.1f} / {q.p90:.1f} / {q.p99:.1f}"


def _optional(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


_ROWS: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("requests", lambda s: str(s.requests)),
    ("prompt tokens, mean", lambda s: f"{s.prompt_tokens:.0f}"),
    ("TTFT p50 / p90 / p99, ms", lambda s: _quantiles(s.ttft_ms)),
    ("inter-token p50 / p90 / p99, ms", lambda s: _quantiles(s.inter_token_ms)),
    ("output tokens/s, all streams", lambda s: f"{s.output_tokens_per_s:.1f}"),
    ("output tokens/s, one stream", lambda s: f"{s.stream_tokens_per_s:.1f}"),
    ("requests/s", lambda s: f"{s.requests_per_s:.2f}"),
    ("prefix hit rate, text tokens", lambda s: _share(s.prefix_hit_rate)),
    ("vision hit rate, images", lambda s: _share(s.vision_hit_rate)),
    ("vision encoder runs", lambda s: str(s.vision_encoder_runs)),
    ("image decodes", lambda s: str(s.image_decodes)),
    ("prefill / decode seconds", lambda s: _optional(s.prefill_decode_ratio)),
    ("peak RSS so far, MB", lambda s: f"{s.peak_rss_mb:.0f}"),
    ("cores taken by other processes", lambda s: _share(s.others_cpu)),
)


def render(report: Report) -> str:
    """The whole report as lines of text."""
    heads = [s.phase for s in report.phases]
    rows = [[name, *(show(s) for s in report.phases)] for name, show in _ROWS]
    for part in ("prepare", "queue", "images", "text"):
        name = f"of TTFT, mean ms: {part}"
        rows.append([name, *(f"{s.ttft_parts_ms[part]:.1f}" for s in report.phases)])
    lines = [*_header(report), "", *table(["", *heads], rows), "", _bound(report)]
    if (warm := report.warm_ratio) is not None:
        lines.append(f"known images: the median first token comes {warm:.1f} times sooner")
    for comparison in report.comparisons:
        lines += ["", *_comparison(comparison)]
    return "\n".join(lines)


def _header(report: Report) -> list[str]:
    f, shape = report.facts, report.shape
    return [
        f"command       {report.command}",
        f"workload      {report.workload}: {shape.sessions} sessions, {shape.turns} turns, "
        f"{shape.images} images in view, {shape.prompt_tokens} + {shape.output_tokens} tokens "
        f"a turn, seed {report.seed}",
        f"model         {report.model}, {report.dtype} weights",
        f"commit        {f.commit}",
        f"device        {f.device}, {f.cores} cores, {f.threads} threads, load before {f.load:.2f}",
        f"libraries     Python {f.python}, torch {f.torch}, transformers {f.transformers}",
    ]


def _bound(report: Report) -> str:
    b = report.bound
    measured = report.phases[-1].stream_tokens_per_s
    return (
        f"memory bound  {b.gigabytes_per_s:.1f} GB/s over {b.weight_megabytes:.0f} MB of weights "
        f"and {b.streams} x {b.context_tokens:.0f} tokens of KV at {b.kv_kilobytes_per_token:.0f} "
        f"kB: {b.tokens_per_s:.0f} tokens/s a stream; measured {measured:.1f} "
        f"({100 * measured / b.tokens_per_s:.0f} %)"
    )


def _comparison(c: Comparison) -> list[str]:
    sides = [("mmserve", c.ours), (c.peer, c.batched)]
    if c.streams > 1:
        sides = [
            ("mmserve", c.ours),
            (f"{c.peer}, one padded batch", c.batched),
            (f"{c.peer}, one after another", c.one_by_one),
        ]
    rows = [[name, *_speed(side, c.ours)] for name, side in sides]
    head = f"{c.streams} streams, {c.prompt_tokens:.0f} prompt tokens"
    others = f"(other processes took {_share(c.others_cpu)} of the cores)"
    return [*table([head, "TTFT ms", "decode tokens/s", "all tokens/s"], rows), others]


def _speed(side: Speed, ours: Speed) -> list[str]:
    def cell(value: float, ratio: float) -> str:
        return f"{value:.1f}" if side is ours else f"{value:.1f} ({ratio:.2f}x)"

    return [
        cell(side.ttft_ms, side.ttft_ms / ours.ttft_ms),
        cell(side.decode_tokens_per_s, ours.decode_tokens_per_s / side.decode_tokens_per_s),
        cell(side.total_tokens_per_s, ours.total_tokens_per_s / side.total_tokens_per_s),
    ]


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)
) -> list[str]:
    """Columns `left` to the left, the others to the right."""
    columns = list(zip(head, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]

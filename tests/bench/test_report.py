"""The report shows every figure and gives the same ones as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mmserve.bench.machine import Facts
from mmserve.bench.peer import Comparison, Speed
from mmserve.bench.report import Bound, Report, render
from mmserve.bench.stats import Quantiles, Summary
from mmserve.bench.workload import Shape

PHASE = Summary(
    phase="load",
    requests=240,
    seconds=10.0,
    ttft_ms=Quantiles(101.0, 102.0, 103.0),
    inter_token_ms=Quantiles(11.0, 12.0, 13.0),
    output_tokens_per_s=77.5,
    stream_tokens_per_s=20.0,
    requests_per_s=24.25,
    prompt_tokens=236.0,
    prefix_hit_rate=0.125,
    vision_hit_rate=None,
    vision_encoder_runs=360,
    image_decodes=361,
    prefill_decode_ratio=1.75,
    ttft_parts_ms={"prepare": 1.5, "queue": 2.5, "images": 3.5, "text": 4.5},
    peak_rss_mb=987.0,
    others_cpu=0.03,
)
COMPARISON = Comparison(
    peer="the other",
    streams=8,
    prompt_tokens=94.0,
    ours=Speed(100.0, 80.0, 40.0),
    batched=Speed(250.0, 20.0, 10.0),
    one_by_one=Speed(300.0, 16.0, 8.0),
    others_cpu=0.04,
)
REPORT = Report(
    command="mmserve bench text",
    workload="text",
    shape=Shape(30, 8, 5, 16, 15),
    seed=3,
    model="tiny",
    dtype="int8",
    facts=Facts("abc+dirty", "a processor", 2, 2, "3.11", "2.14", "5.24", 0.25),
    bound=Bound(8.0, 134.0, 46.0, 30, 240.0, 50.0),
    phases=(PHASE,),
    comparisons=(COMPARISON,),
)


def row(text: str, start: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return line.removeprefix(start).split()


@pytest.mark.parametrize(
    ("start", "shown"),
    [
        ("TTFT p50 / p90 / p99, ms", "101.0 / 102.0 / 103.0"),
        ("inter-token p50 / p90 / p99, ms", "11.0 / 12.0 / 13.0"),
        ("output tokens/s, all streams", "77.5"),
        ("output tokens/s, one stream", "20.0"),
        ("requests/s", "24.25"),
        ("prefix hit rate, text tokens", "12.5 %"),
        ("vision hit rate, images", "-"),
        ("vision encoder runs", "360"),
        ("image decodes", "361"),
        ("prefill / decode seconds", "1.75"),
        ("peak RSS so far, MB", "987"),
        ("of TTFT, mean ms: images", "3.5"),
        ("cores taken by other processes", "3.0 %"),
    ],
)
def test_each_figure_has_its_row(start: str, shown: str) -> None:
    assert row(render(REPORT), start) == shown.split()


def test_the_header_says_what_ran_where() -> None:
    text = render(REPORT)
    for fact in ("mmserve bench text", "abc+dirty", "a processor", "2 threads", "2.14", "seed 3"):
        assert fact in text
    assert "int8" in text and "load before 0.25" in text


def test_the_bound_stands_beside_the_decode_rate() -> None:
    assert "50 tokens/s a stream; measured 20.0 (40 %)" in render(REPORT)


def test_ratios_are_the_peers_figure_against_ours() -> None:
    text = render(REPORT)
    assert row(text, "the other, one padded batch") == (
        "250.0 (2.50x) 20.0 (4.00x) 10.0 (4.00x)".split()
    )
    assert row(text, "the other, one after another") == (
        "300.0 (3.00x) 16.0 (5.00x) 8.0 (5.00x)".split()
    )


def test_one_stream_has_one_row_of_the_peer() -> None:
    text = render(replace(REPORT, comparisons=(replace(COMPARISON, streams=1),)))
    assert len([line for line in text.splitlines() if line.startswith("the other")]) == 1


def test_cold_and_warm_phases_give_a_ratio() -> None:
    cold = replace(PHASE, phase="cold", ttft_ms=Quantiles(500.0, 501.0, 502.0))
    warm = replace(PHASE, phase="warm", ttft_ms=Quantiles(50.0, 51.0, 52.0))
    assert "comes 10.0 times sooner" in render(replace(REPORT, phases=(cold, warm)))
    assert REPORT.warm_ratio is None
    assert "sooner" not in render(REPORT)


def test_the_json_holds_what_the_table_shows() -> None:
    data = json.loads(REPORT.to_json())
    assert data["phases"][0]["ttft_ms"] == {"p50": 101.0, "p90": 102.0, "p99": 103.0}
    assert data["comparisons"][0]["ours"]["decode_tokens_per_s"] == 80.0
    assert data["facts"]["commit"] == "abc+dirty"
    assert data["shape"]["sessions"] == 30
    assert data["bound"]["tokens_per_s"] == 50.0
    assert data["warm_ratio"] is None

"""The kernels suite at toy size, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import triton

from mmserve.__main__ import main
from mmserve.bench import kernel_cases, kernels
from mmserve.bench.ceilings import Ceilings
from mmserve.bench.dims import MISTRAL_7B, TextDims
from mmserve.bench.kernel_cases import (
    Cascade,
    Choice,
    Decode,
    Heads,
    KernelCases,
    Plan,
    products,
    seconds_each,
    skewed,
)
from mmserve.bench.kernels import KernelSuite, bench_kernels
from mmserve.bench.suite import Line, read_report, run_cases
from mmserve.kernels import work
from mmserve.kernels.kv_formats import FORMATS, Pages
from tests.bench.tiny import PROBE

HEADS = Heads(query=4, kv=2, dim=16)
DIMS = TextDims("mistral", 1, 32, 2, 1, 16, 24, 300, 1e6)
PLAN = Plan(
    decode=(Decode("2 uneven", (5, 90), HEADS), Decode("1 x 20", (20,), HEADS)),
    cascades=(
        Cascade(3, 2, 20, 7, Heads(query=2, kv=2, dim=16)),
        Cascade(3, 2, 30, 7, Heads(query=14, kv=2, dim=16)),
    ),
    prefill=(20,),
    prefill_heads=HEADS,
    products=DIMS,
    logits=(2, 300),
    choices=(Choice("top-k 5, top-p 0.9", 5, 0.9),),
    spread_bytes=1,
    calls=2,
    repeats=1,
)
NAMES = [
    "decode attention 2 uneven",
    "decode attention 1 x 20",
    "cascade 3 queries, the same 2 images of 20",
    "cascade 3 queries, the same 2 images of 30",
    "prefill attention 1 x 20, dense",
    "prefill attention 1 x 20, paged",
    "gemv norm, q k v",
    "gemv attention's output, residual",
    "gemv norm, gate and up, SiLU",
    "gemv down, residual",
    "gemv, a layer's four in turn",
    "greedy 2 x 300",
    "top-k 5, top-p 0.9 2 x 300",
]
CPU = torch.device("cpu")


def cases(plan: Plan = PLAN) -> KernelCases:
    return KernelCases(plan, CPU, torch.float32, Ceilings(4e12, 7e14))


@pytest.fixture
def one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call takes a second and is not made."""
    monkeypatch.setattr(kernel_cases, "seconds_each", lambda *_: 1.0)
    monkeypatch.setattr(kernel_cases, "median_seconds", lambda *_, **__: 1.0)


def lines(plan: Plan = PLAN) -> dict[str, Line]:
    return {line.case: line for case in cases(plan).all() for line in case.run()}


def test_every_case_gives_its_line_and_the_json_holds_them(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    report = bench_kernels(KernelSuite("auto", plan=PLAN, probe=PROBE, json=path, budget_s=3600))
    assert [line.fault for line in report.lines] == [None] * len(NAMES)
    assert [line.case for line in report.lines] == NAMES
    assert read_report(path) == report
    for line in json.loads(path.read_text())["lines"]:
        assert line["value"] > 0 and line["bound"] > 0, line["case"]
    assert report.lines[2].figures["largest difference"] < 1e-2


@pytest.mark.usefixtures("one_second")
def test_figures_are_what_must_be_read_or_computed_a_second() -> None:
    found = lines()
    values = [None if line.value is None else line.value * 1e12 for line in found.values()]
    keys_and_values = 2 * 2 * 16 * 4  # of a token: K and V, KV heads, head_dim, float32
    operations = 4 * 4 * 16 * 20**2 / 2
    weights = [4 * n for n in (64 * 32, 32 * 32, 48 * 32, 32 * 24)]
    assert values[:2] == pytest.approx([95 * keys_and_values, 20 * keys_and_values])
    assert values[4:6] == pytest.approx([operations] * 2)
    assert values[6:11] == pytest.approx([*weights, sum(weights)])
    assert values[11:] == pytest.approx([4 * 2 * 300] * 2)
    # Once 40 or 60 tokens of images and 21 of text, or 47 or 67 for each of three queries.
    assert found[NAMES[2]].bound == pytest.approx(3 * 47 / 61)
    assert found[NAMES[3]].bound == pytest.approx(3 * 67 / 81)
    assert found[NAMES[0]].share == pytest.approx(95 * keys_and_values / 4e12)
    assert found[NAMES[4]].bound == 700


def test_nothing_is_read_again_before_more_than_a_cache_holds_was_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[int] = []

    def count(calls: list[object], *_: object) -> float:
        counts.append(len(calls))
        return 1.0

    monkeypatch.setattr(kernel_cases, "seconds_each", count)
    plan = dataclasses.replace(PLAN, spread_bytes=50_000, prefill=())
    found = lines(plan)
    for case, made in zip(
        [NAMES[0], NAMES[1], *NAMES[6:]], [*counts[:2], *counts[6:]], strict=True
    ):
        value = found[case].value
        assert value is not None
        assert made * value * 1e12 >= 50_000 > (made - 1) * value * 1e12


def test_a_step_reads_the_tokens_of_its_own_pages() -> None:
    """Values all the same number: so is their mean, wherever the pages lie."""
    every = cases()
    (pages,) = every._shuffled([3])
    step = every._step(HEADS, [work.Reader(0, 1, (0, 40, 0, 0), pages)])
    pool = torch.randn(2, 2, 3, 16, 16)
    pool[1] = 7.0
    step.read(Pages(*pool), Pages(*pool))
    torch.testing.assert_close(step.out, torch.full_like(step.out, 7.0))


@pytest.mark.usefixtures("one_second")
@pytest.mark.parametrize(("name", "tile"), [("int8", 16 * 16 + 2 * 16), ("int4", 64 * 8 + 4 * 64)])
def test_a_format_is_measured_by_the_bytes_of_its_tiles(name: str, tile: int) -> None:
    kind = FORMATS[name]
    plan = dataclasses.replace(PLAN, decode=(Decode(name, (5, 90), HEADS, kind),))
    line = lines(plan)[f"decode attention {name}"]
    pages = 3 if kind.whole_pages else 7
    assert line.value == pytest.approx(2 * 2 * pages * tile / 1e12)
    assert line.figures["x faster than as computed"] == 1


def test_pages_are_all_different_and_in_no_order() -> None:
    parts = cases()._shuffled([40, 0, 60])
    assert [len(part) for part in parts] == [40, 0, 60]
    every = np.concatenate(parts)
    assert sorted(every) == list(range(100)) != every.tolist()


def test_a_call_takes_its_share_of_all_calls_made() -> None:
    made: list[str] = []
    calls = [partial(made.append, name) for name in "abc"]
    assert seconds_each(calls, CPU, PLAN) > 0
    assert "".join(made) == "abc" * 2  # to warm up, and once for the clock


def test_a_skewed_batch_is_the_same_every_time_and_within_its_limits() -> None:
    lengths = skewed(64, 64, 65536)
    assert lengths == skewed(64, 64, 65536) != skewed(64, 64, 65536, seed=1)
    assert len(lengths) == 64 and min(lengths) >= 64 and max(lengths) <= 65536
    assert 20 <= len([n for n in lengths if n < 2048]) <= 44  # half, by logarithm


def test_the_four_products_hold_all_weights_of_a_layer() -> None:
    sizes = sum(p.rows * p.width for p in products(MISTRAL_7B))
    assert sizes == 4096 * (4096 + 2 * 1024) + 4096**2 + 3 * 4096 * 14336


def test_a_case_that_fails_is_one_line() -> None:
    broken = Decode("too many heads", (20,), Heads(query=130, kv=1, dim=16))
    plan = dataclasses.replace(PLAN, decode=(broken, PLAN.decode[1]))
    first, other, *_ = run_cases(islice(cases(plan).all(), 2), math.inf)
    assert first.fault is not None and "AssertionError" in first.fault
    assert other.fault is None and other.value


def test_without_a_gpu_the_suite_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match="needs a GPU"):
        bench_kernels(KernelSuite("cpu", plan=PLAN, probe=PROBE))


def test_the_command_line_reaches_the_kernels_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[KernelSuite] = []
    monkeypatch.setattr(kernels, "bench_kernels", asked.append)
    file = tmp_path / "out.json"
    words = "bench kernels --device cuda --budget-seconds 60 --seed 3 --json"
    main([*words.split(), str(file)])
    (suite,) = asked
    assert (suite.device, suite.budget_s, suite.seed, suite.json) == ("cuda", 60, 3, file)
    assert suite.plan == Plan()

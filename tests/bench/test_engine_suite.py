"""The engine suite at toy size on the CPU: every case runs, counts and frees what it used."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mmserve.bench import load as load_module
from mmserve.bench.ceilings import Ceilings
from mmserve.bench.dims import NO_TOWER
from mmserve.bench.engine_cases import EngineCases
from mmserve.bench.engine_suite import EngineSuite, bench_engine
from mmserve.bench.load import Load, Window, kv_bytes
from mmserve.bench.shapes import build_shape
from mmserve.bench.sizes import Sizes
from mmserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mmserve.engine.engine import Engine
from tests.bench.tiny import PLAN, PROBE, SHAPE

HOUR_S = 3600.0  # a limit that is none
CONFIG = ModelConfig(device="cpu", dtype="float32")
PAGE_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # K and V, layers, KV heads, head_dim, tokens, float32


def load(*, text_pages: int = 100, joules: float | None = None) -> Load:
    """A new engine; a counter that gains `joules` at every reading."""
    loaded = build_shape(SHAPE, torch.device("cpu"), torch.float32)
    cache = CacheConfig(text_bytes=text_pages * PAGE_BYTES, vision_bytes=20 * PAGE_BYTES)
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32)
    engine = Engine(EngineConfig(CONFIG, cache, scheduler), loaded)
    counter = itertools.count()
    read = None if joules is None else lambda: joules * next(counter)
    return Load(engine, read)


def test_every_case_gives_its_lines_and_the_json_holds_them(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    suite = EngineSuite(SHAPE, peer=True, plan=PLAN, probe=PROBE, step_tokens=32, json=path)
    report = bench_engine(dataclasses.replace(suite, budget_s=HOUR_S), CONFIG)
    assert [line.fault for line in report.lines] == [None] * len(report.lines)
    assert [line.case for line in report.lines] == [
        "transformers generate 1 x 24",
        "transformers generate 4 x 24",
        "decode 1 x 24",
        "decode 4 x 24",
        "TTFT 4 text tokens",
        "prefill 64",
        "TTFT 3 new images",
        "TTFT 3 known images, same place",
        "TTFT 3 known images behind other text",
        "TTFT window of 3, 1 new",
        "decode 4 sessions, the same 2 images",
        "decode 4 sessions, the same 3 images",
        "decode 1 x 40",
        "decode 4 x 40",
    ]
    by_name = {line.case: line for line in report.lines}
    assert "x generate" in by_name["decode 4 x 24"].figures
    assert "x generate" not in by_name["decode 4 x 40"].figures
    assert all(line["value"] > 0 for line in json.loads(path.read_text())["lines"])


def test_in_their_context_images_are_computed_again_behind_other_text_and_bounded_so() -> None:
    only = ("TTFT 3 images",)
    suite = EngineSuite(SHAPE, plan=PLAN, probe=PROBE, step_tokens=64, only=only, budget_s=HOUR_S)
    for mode, moved in (("auto", False), ("prefix", True)):
        report = bench_engine(suite, dataclasses.replace(CONFIG, vision_mode=mode))
        assert [line.fault for line in report.lines] == [None] * 4
        assert report.model.endswith("prefix images" if moved else "isolated images")
        new, same, behind, slid = (line.bound or 0.0 for line in report.lines)
        assert same <= behind and (behind > same) is moved
        # A window that slides by one encodes one image, and all that have moved pass once more.
        tower = (new - same) / 3 if not moved else (new - behind) / 3
        assert slid == pytest.approx(behind + tower)


def test_a_text_shape_is_asked_nothing_about_images() -> None:
    shape = dataclasses.replace(SHAPE, vision=NO_TOWER)
    plan = dataclasses.replace(PLAN, decode=PLAN.decode[:2])
    suite = EngineSuite(shape, plan=plan, probe=PROBE, step_tokens=32, budget_s=HOUR_S)
    report = bench_engine(suite, CONFIG)
    assert not any("image" in line.case for line in report.lines)
    assert [line.fault for line in report.lines] == [None] * len(report.lines)


def test_a_batch_decodes_one_token_a_sequence_and_step() -> None:
    running = load()
    running.start_decoding([[running.text(20)] for _ in range(3)], grown=40)
    _, steps, tokens = running.time_steps(Window(seconds=HOUR_S, max_steps=5, warm_up=1))
    assert (steps, tokens) == (5, 15)
    running.check_running(3)
    running.clear()
    assert not running.engine.has_work
    assert running.engine.scheduler.text[0].num_free == 100


def test_sessions_over_the_same_image_read_its_pages_once() -> None:
    running = load()
    image = running.image()
    running.start_decoding([[image, running.text(16)] for _ in range(3)], grown=32)
    once, each = kv_bytes(running)
    assert each - once == 2 * PAGE_BYTES  # four visual tokens are one page


def test_known_images_are_not_encoded_again() -> None:
    running = load()
    images = running.images(2)
    for _ in range(3):
        assert running.ask([running.text(4), *images, running.text(4)]) > 0
    assert "mmserve:vision_encoder_runs_total 2.0" in running.engine.metrics.render().decode()


def test_what_cannot_run_side_by_side_is_refused_with_its_size() -> None:
    running = load(text_pages=4)
    with pytest.raises(ValueError, match="does not fit: needs 0 GB"):
        running.start_decoding([[running.text(30)] for _ in range(3)], grown=16)
    assert not running.engine.has_work


def test_steps_too_small_for_all_to_begin_in_time_are_refused() -> None:
    """Else those that began first would crowd the others out, again and again."""
    running = load()
    with pytest.raises(ValueError, match="before the first has 3 tokens: steps are small"):
        running.start_decoding([[running.text(60)] for _ in range(6)], grown=3)


def test_a_case_that_never_ends_is_ended() -> None:
    running = load()
    running.deadline = time.monotonic() - 1
    with pytest.raises(TimeoutError):
        running.ask([running.text(4)])


def test_joules_are_those_between_two_movements_over_the_units_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load_module, "_EDGE_S", HOUR_S)
    running = load(joules=6.0)  # every reading moves the counter
    work = itertools.count()

    def unit() -> int:
        next(work)
        return 2

    # one call to the first movement, three in the window, one to the last movement
    each = running.joules_each(unit, Window(seconds=HOUR_S, max_steps=3))
    assert next(work) == 5
    assert each == pytest.approx((3 * 6.0 - 6.0) / 8)
    assert load().joules_each(unit, Window()) is None


def test_energy_cases_need_a_counter() -> None:
    running = load(joules=1.0)
    sizes = Sizes.of(build_shape(SHAPE, torch.device("cpu"), torch.float32))
    cases = EngineCases(running, sizes, Ceilings(1e9, 1e9), PLAN).all()
    energy = [line for case in cases if "energy" in case.name for line in case.run()]
    assert [line.unit for line in energy] == ["J"] * 4
    running.read_joules = None
    without = EngineCases(running, sizes, Ceilings(1e9, 1e9), PLAN).all()
    assert not any("energy" in case.name for case in without)


def test_where_sharing_can_be_switched_off_both_ways_are_measured() -> None:
    running = load()
    runner: Any = running.engine.runner
    runner.shares = True
    seen: list[bool] = []
    run = runner.run

    def watch(*args: Any) -> Any:
        seen.append(runner.shares)
        return run(*args)

    runner.run = watch
    sizes = Sizes.of(build_shape(SHAPE, torch.device("cpu"), torch.float32))
    cases = EngineCases(running, sizes, Ceilings(1e9, 1e9), PLAN).all()
    (line,) = next(case for case in cases if "the same 2 images" in case.name).run()
    assert line.figures["% of tokens equal"] == 100
    assert line.figures["x faster than unshared"] > 0
    assert set(seen) == {True, False} and runner.shares

"""`mmserve bench` over the default model: a few tokens of each kind, no timing asserted."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from mmserve.__main__ import build_parser, main
from mmserve.bench import engine_suite
from mmserve.bench.command import Options, measure
from mmserve.bench.dims import SHAPES
from mmserve.bench.engine_suite import EngineSuite
from mmserve.bench.workload import Shape
from mmserve.config import CacheConfig, EngineConfig, ModelConfig

MIB = 1024**2
CONFIG = EngineConfig(cache=CacheConfig(text_bytes=64 * MIB, vision_bytes=64 * MIB))


def test_an_unknown_workload_is_refused_before_anything_loads() -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["bench", "no-such"])


def test_the_command_line_reaches_the_workload() -> None:
    words = "bench text --sessions 3 --peer transformers".split()
    args = build_parser().parse_args(words)
    assert (args.workload, args.sessions, args.turns, args.peer) == (
        "text",
        3,
        None,
        "transformers",
    )


def test_the_command_line_reaches_the_engine_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[EngineSuite, ModelConfig]] = []
    monkeypatch.setattr(engine_suite, "bench_engine", lambda *of: asked.append(of))
    file = tmp_path / "out.json"
    words = "bench engine --device cpu --shape qwen2.5-7b --budget-seconds 60 --step-tokens 4096"
    main([*words.split(), "--peer", "transformers", "--seed", "3", "--json", str(file)])
    main(["bench", "engine"])
    (suite, model), (plain, _) = asked
    assert suite.shape == SHAPES["qwen2.5-7b"] and model.device == "cpu"
    assert (suite.budget_s, suite.step_tokens, suite.seed) == (60, 4096, 3)
    assert (suite.peer, suite.json) == (True, file)
    assert (plain.shape, plain.peer, plain.json) == (None, False, None)


@pytest.mark.model
def test_a_sliding_run_finds_four_of_five_images() -> None:
    options = Options("sliding-images", Shape(2, 3, 5, 4, 2))
    report = asyncio.run(measure(options, CONFIG))
    (load,) = report.phases
    assert load.requests == 2 * 3
    assert load.vision_encoder_runs == load.image_decodes == 2 * (5 + 2)
    assert load.vision_hit_rate == pytest.approx(2 * (0 + 4 + 4) / (2 * 15))
    assert report.bound.streams == 2


@pytest.mark.model
def test_known_images_behind_new_text_are_neither_decoded_nor_encoded() -> None:
    report = asyncio.run(measure(Options("cached-images", Shape(2, 1, 5, 4, 2)), CONFIG))
    cold, warm = report.phases
    assert (cold.vision_encoder_runs, cold.image_decodes, cold.vision_hit_rate) == (10, 10, 0.0)
    assert (warm.vision_encoder_runs, warm.image_decodes, warm.vision_hit_rate) == (0, 0, 1.0)
    assert report.warm_ratio is not None


@pytest.mark.model
@pytest.mark.parametrize("workload", ["text", "one-image"])
def test_a_run_with_the_peer_from_the_command_line(
    workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    sizes = "--sessions 2 --turns 1 --prompt-tokens 4 --output-tokens 2".split()
    pools = "--kv-cache-memory-bytes 64M --vision-kv-cache-memory-bytes 64M".split()
    main(["bench", workload, *sizes, *pools, "--peer", "transformers", "--json", str(file)])
    shown = capsys.readouterr().out
    assert "2 streams" in shown and "transformers generate, float32" in shown
    data = json.loads(file.read_text())
    assert [c["streams"] for c in data["comparisons"]] == [1, 2]
    # 2 sessions; the prompts hold the template, the text and one image of 32 tokens, if any
    assert data["phases"][0]["prompt_tokens"] > (32 if workload == "one-image" else 4)

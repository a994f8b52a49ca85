"""Families by their config.json: as large as the models they are named after, and servable."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from mmserve.bench import families
from mmserve.bench.families import FamilySuite, bench_families, build_family
from mmserve.bench.family_shapes import FAMILIES, Words
from mmserve.bench.sizes import Sizes
from mmserve.config import CacheConfig, EngineConfig, ModelConfig
from mmserve.engine.engine import Engine
from mmserve.model.weights import LoadedCheckpoint
from tests.bench.tiny import PLAN, PROBE
from tests.engine.driver import Driver, words

CPU = torch.device("cpu")
TINY: Words = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,  # of Gemma 3's five are windows, and one is whole
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
    "query_pre_attn_scalar": 16,
    "cross_attention_layers": [1, 3],
    "num_heads": 2,
    "attention_heads": 2,
    "image_size": 112,
    "vision_output_dim": 128,
    "out_hidden_size": 64,
    "projection_dim": 64,
    "mrope_section": [2, 3, 3],
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "depth": 1,
}


def tiny(words: Words) -> Words:
    """The same config with small dimensions; what says how layers differ stays."""
    small: Words = {}
    for key, value in words.items():
        if isinstance(value, dict):
            small[key] = tiny(value)
        elif isinstance(value, list) and key == "image_size":
            small[key] = [TINY[key]] * 2
        else:
            small[key] = TINY.get(key, value)
    return small


def of_tiny(name: str) -> LoadedCheckpoint:
    return build_family(name, tiny(FAMILIES[name]), CPU, torch.float32)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # of the language models, as their cards have them
        ("gemma2-9b", 9_241_705_984),
        ("gemma3-4b", 4_300_079_472 - 419_816_304),
        ("qwen2.5-vl-7b", 7_615_616_512),
        ("qwen3-vl-8b", 8_190_735_360),
        ("pixtral-12b", 12_247_782_400),
        ("mistral3-24b", 23_572_403_200),
        ("phi3.5-mini", 3_821_079_552),
        ("phi4", 14_659_507_200),
        ("phi2", 2_779_683_840),
        ("llama3.1-8b", 8_030_261_248),
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_a_family_has_as_many_weights_as_the_model_it_is_named_after(
    name: str, parameters: int
) -> None:
    lm = empty(FAMILIES[name])
    parts = (lm.get_decoder(), lm.get_output_embeddings())
    unique = {id(p): p.numel() for part in parts for p in part.parameters()}
    assert sum(unique.values()) == parameters


def empty(words: Words) -> Any:
    """The model without any weights in memory."""
    config = AutoConfig.for_model(**words)
    kind = AutoModelForImageTextToText if "vision_config" in words else AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(config)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_answers_through_the_engine_like_any_checkpoint(name: str) -> None:
    loaded = of_tiny(name)
    cache = CacheConfig(text_bytes=1 << 22, vision_bytes=1 << 22)
    engine = Engine(EngineConfig(ModelConfig(device="cpu"), cache), loaded)
    driver = Driver(engine)
    assert len(driver.ask(words(1, 20))) == 8
    assert loaded.stock and driver.engine.runner.stock
    assert loaded.name in engine.name


def test_a_bound_counts_the_layers_that_text_passes_and_the_head() -> None:
    """Of Llama 3.2 Vision those that look at images are left out, as they are when it answers."""
    loaded = of_tiny("llama3.2-vision-11b")
    sizes = Sizes.of(loaded)
    ran: list[int] = []
    lm: Any = loaded.lm
    layers = lm.get_decoder().layers
    for layer in layers:
        layer.register_forward_hook(lambda layer, *_: ran.append(id(layer)))
    cache = CacheConfig(text_bytes=1 << 22, vision_bytes=1 << 22)
    engine = Engine(EngineConfig(ModelConfig(device="cpu"), cache), loaded)
    ran.clear()  # what the model was asked about itself
    Driver(engine).ask(words(1, 20))
    passed = [layer for layer in layers if id(layer) in ran]
    assert len(passed) == 4 and len(layers) == 6
    counted = sum(p.numel() for layer in passed for p in layer.parameters())
    assert (sizes.layer_weights, sizes.weights) == (counted, counted + 300 * 64)


def test_a_bound_of_a_tied_head_counts_it_once() -> None:
    loaded = of_tiny("gemma2-9b")
    lm: Any = loaded.lm
    sizes = Sizes.of(loaded)
    assert sizes.weights == sum(p.numel() for p in lm.parameters()) - 64  # and not the last norm


def test_the_suite_measures_each_family_and_a_broken_one_costs_its_own_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Any]] = []

    def watched(*args: Any) -> LoadedCheckpoint:
        assert all(lm() is None for lm in made), "two models at once may be more than fit"
        loaded = build_family(*args)
        made.append(weakref.ref(loaded.lm))
        return loaded

    monkeypatch.setattr(families, "build_family", watched)
    path = tmp_path / "out.json"
    chosen = {name: tiny(FAMILIES[name]) for name in ("gemma3-4b", "phi3.5-mini")}
    suite = FamilySuite(
        {"broken": {"model_type": "none"}, **chosen}, plan=PLAN, probe=PROBE, json=path
    )
    report = bench_families(suite, ModelConfig(device="cpu"))
    assert [line.case for line in report.lines] == [
        "broken",
        "gemma3-4b: decode 1 x 24",
        "gemma3-4b: TTFT 4 text tokens",
        "phi3.5-mini: decode 1 x 24",
        "phi3.5-mini: TTFT 4 text tokens",
    ]
    assert report.lines[0].fault is not None
    assert all(line.share is not None for line in report.lines[1:])
    assert len(json.loads(path.read_text())["lines"]) == 5 and len(made) == 2

"""What a model says of itself: layer groups, heads, positions; and what is not of our kind."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf

from mmserve.cache.layer_group import LayerGroup
from mmserve.config import CacheConfig, ModelConfig
from mmserve.engine.model_runner import ModelRunner
from mmserve.model.adapter import Adapter
from tests.model import families


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "families"


def model_of(name: str, folders: Path) -> Any:
    return families.load(families.build(name, folders))[0]


@pytest.mark.parametrize("name", [*families.VISION, *families.TEXT])
def test_every_family_is_understood_in_half_precision_too(name: str, folders: Path) -> None:
    model = model_of(name, folders).to(torch.bfloat16)
    adapter = Adapter(model)
    assert sorted(i for g in adapter.groups for i in g.layers) == sorted(adapter.layers)
    assert adapter.dtype is torch.bfloat16
    assert adapter.logits(torch.zeros(2, adapter.hidden_size, dtype=torch.bfloat16)).shape == (
        2,
        adapter.vocab_size,
    )


def test_layers_are_grouped_by_what_they_read(folders: Path) -> None:
    assert Adapter(model_of("llama_gqa", folders)).groups == (LayerGroup((0, 1, 2)),)
    assert Adapter(model_of("mistral", folders)).groups == (LayerGroup((0, 1, 2), 24),)
    assert Adapter(model_of("gemma3", folders)).groups == (
        LayerGroup((5,)),
        LayerGroup((0, 1, 2, 3, 4), 24),
    )
    assert Adapter(model_of("mllama", folders)).groups == (
        LayerGroup((0, 2, 4), images=False),
        LayerGroup((1, 3), text=False),
    )
    heads = {n: Adapter(model_of(f"llama_{n}", folders)).layers[0].kv_heads for n in ("mha", "mqa")}
    assert heads == {"mha": 4, "mqa": 1}


def small(kind: Any, **more: Any) -> Any:
    return kind(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        **more,
    )


@pytest.mark.parametrize(
    "config",
    [
        small(hf.Lfm2Config, layer_types=["conv", "full_attention"], num_hidden_layers=2),
        hf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4),
        hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2),
    ],
    ids=lambda config: config.model_type,
)
def test_a_model_that_is_more_than_attention_is_refused_in_a_sentence(config: Any) -> None:
    lm = hf.AutoModelForCausalLM.from_config(config).eval()
    loaded: Any = SimpleNamespace(
        lm=lm,
        name="a/b",
        stock=True,
        device=torch.device("cpu"),
        max_model_len=64,
        eos_token_ids=frozenset({1}),
        rope_scaling=None,
    )
    with pytest.raises(ValueError, match=r"^a/b cannot be served \(\w+ForCausalLM\)|LMHead"):
        ModelRunner(loaded, CacheConfig(), ModelConfig(dtype="float32"))

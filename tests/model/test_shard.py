"""Ranks' parts of a decoder make up the whole."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from mmserve.model.shard import SplitInputs, Total, split_decoder
from tests.model.family_text import TEXT


def llama(heads: int, kv_heads: int, ffn: int = 24) -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=4 * heads,
        intermediate_size=ffn,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=4,
        vocab_size=9,
    )
    return AutoModelForCausalLM.from_config(config)


def parts(lm: Any, ranks: int) -> list[Any]:
    found = []
    for rank in range(ranks):
        own = copy.deepcopy(lm)
        split_decoder(own, rank, ranks, Total(first=True))
        found.append(own.model.layers[0])
    return found


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_heads_and_widths_are_shared_out_whole(
    kv_each: int, group: int, ranks: int, copies: int
) -> None:
    """Either ranks have several heads of keys and values, or several ranks the same one."""
    kv_heads = kv_each * ranks if copies == 1 else kv_each
    ranks = ranks if copies == 1 else kv_each * copies
    heads = kv_heads * group * (1 if copies == 1 else copies)
    lm = llama(heads, kv_heads, 6 * ranks)
    whole, split = lm.model.layers[0], parts(lm, ranks)
    for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj"):
        mine = torch.cat([part.get_submodule(name).weight for part in split])
        assert torch.equal(mine, whole.get_submodule(name).weight)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert all(isinstance(part.get_submodule(name), SplitInputs) for part in split)
        mine = torch.cat([part.get_submodule(name).weight for part in split], 1)
        assert torch.equal(mine, whole.get_submodule(name).weight)
    size = heads // kv_heads  # queries' heads that read one of keys
    for rank, part in enumerate(split):
        own = heads // ranks
        for n, head in enumerate(range(rank * own, (rank + 1) * own)):
            keys = part.self_attn.k_proj.weight.view(-1, 4, 4 * heads)
            read = keys[n * len(keys) // own]
            assert torch.equal(
                read, whole.self_attn.k_proj.weight.view(-1, 4, 4 * heads)[head // size]
            )


def test_products_with_split_inputs_add_up_and_have_their_bias_once() -> None:
    x, linear = torch.randn(3, 8), nn.Linear(8, 5)
    said: list[torch.Tensor] = []
    for rank in range(2):
        total = Total(first=not rank)
        total.connect(said.append)
        weight = linear.weight.detach()[:, 4 * rank :][:, :4]
        with torch.no_grad():
            SplitInputs(weight, linear.bias.detach(), total)(x[:, 4 * rank :][:, :4])
    torch.testing.assert_close(sum(said) + linear.bias, linear(x))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ffn", "ranks", "said"),
    [
        (9, 3, 24, 2, "9 attention heads cannot be split over 2 ranks"),
        (6, 2, 24, 3, "2 heads of keys and values cannot be shared by 3 ranks"),
        (4, 2, 15, 2, "an MLP 15 wide cannot be split over 2 ranks"),
    ],
)
def test_what_does_not_divide_is_named(
    heads: int, kv_heads: int, ffn: int, ranks: int, said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        split_decoder(llama(heads, kv_heads, ffn), 0, ranks, Total(first=True))


def test_products_that_a_plan_does_not_split_are_refused() -> None:
    with pytest.raises(ValueError, match="qkv_proj"):
        split_decoder(
            AutoModelForCausalLM.from_config(TEXT["phi3"]().config), 0, 2, Total(first=True)
        )

"""Fusing changes how a model is computed and not what: packed, normed, rotated as before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from mmserve.cache.kv_pool import KVPool, KVShape
from mmserve.cache.layer_group import LayerGroup
from mmserve.engine.plan import Planner
from mmserve.kernels import int8
from mmserve.kernels.reference import rope_table
from mmserve.model import attention
from mmserve.model.cpu_layer import CPULayer
from mmserve.model.fuse import (
    DenseLinear,
    FusedRMSNorm,
    Int8Linear,
    PackedFirst,
    PackedNext,
    TableRotary,
    fuse,
)
from mmserve.request import Request, SamplingParams, TextSegment
from mmserve.scheduler.batch import Chunk
from mmserve.sequence import Sequence

DIM, THETA = 16, 10_000.0


def config(kind: type, **more: Any) -> Any:
    return kind(
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=True,
        **more,
    )


def llama(**more: Any) -> Any:
    torch.manual_seed(2)
    return LlamaForCausalLM(config(LlamaConfig, **more)).eval().requires_grad_(False)


def qwen() -> Any:
    """Biases on q, k and v, none elsewhere."""
    torch.manual_seed(2)
    lm = Qwen2ForCausalLM(config(Qwen2Config)).eval().requires_grad_(False)
    for name, parameter in lm.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    return lm


def causal_step(length: int) -> attention.Step:
    """One sequence from its first token on, over pools of its own."""
    shape = KVShape(2, 2, DIM, 16, torch.float32, torch.device("cpu"))
    seq = Sequence(Request("x", (TextSegment(tuple(range(length))),), SamplingParams()))
    seq.tables = [list(range(-(-length // 16)))]
    groups = [LayerGroup((0, 1))]
    planner = Planner(groups, rope_table(length, DIM, THETA), 16)
    (plan,) = planner.step([Chunk(seq, 0, length, True)]).plans
    pools = KVPool(shape, len(seq.tables[0])), KVPool(shape, 1)
    return attention.Step((attention.GroupStep(plan, *pools),), attention.places(groups))


def fused_logits(lm: Any, ids: Tensor, weights: str) -> Tensor:
    lm = copy.deepcopy(lm)
    attention.register()
    lm.config._attn_implementation = attention.NAME
    fuse(lm, table=rope_table(256, DIM, THETA), weights=weights)
    with torch.inference_mode():
        hidden = lm.model(
            inputs_embeds=lm.get_input_embeddings()(ids)[None],
            position_ids=torch.arange(len(ids))[None],
            use_cache=False,
            step=causal_step(len(ids)),
        ).last_hidden_state
        out: Tensor = lm.lm_head(hidden)[0]
    return out.clone()


@pytest.mark.parametrize("make", [llama, qwen])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_a_fused_model_equals_transformers(make: Any, length: int) -> None:
    lm = make()
    ids = torch.randint(0, 50, (length,), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        expected = lm(ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(fused_logits(lm, ids, "dense"), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [llama, qwen])
@pytest.mark.parametrize("length", [1, 17])
def test_8_bit_weights_stay_close_to_the_rounded_ones(make: Any, length: int) -> None:
    """Against the same model whose weights hold exactly what eight bits hold."""
    lm = make()
    ids = torch.randint(0, 50, (length,), generator=torch.Generator().manual_seed(length))
    got = fused_logits(lm, ids, "int8")
    rounded = copy.deepcopy(lm)
    rounded.lm_head.weight = nn.Parameter(rounded.lm_head.weight.clone(), requires_grad=False)
    for module in rounded.modules():
        if isinstance(module, nn.Linear):
            held, scale = int8.quantize_weight(module.weight)
            module.weight.data = held.float() * scale[:, None]
    with torch.no_grad():
        expected = rounded(ids[None], use_cache=False).logits[0]
    spread = float(expected.std())
    assert float((got - expected).abs().max()) < 0.002 * spread + 1e-4


def test_layers_that_the_fused_one_does_not_compute_are_left_to_transformers() -> None:
    plain, biased = llama(), llama(attention_bias=True)
    assert all(CPULayer.fits(layer) for layer in plain.model.layers)
    assert not any(CPULayer.fits(layer) for layer in biased.model.layers)
    assert not any(CPULayer.fits(layer) for layer in qwen().model.layers)
    fuse(plain, table=rope_table(256, DIM, THETA), weights="int8")
    assert all(isinstance(layer, CPULayer) for layer in plain.model.layers)


def test_projections_on_one_input_become_one_product() -> None:
    lm = llama()
    fuse(lm, table=rope_table(256, DIM, THETA), weights="dense")
    block = lm.model.layers[0]
    assert isinstance(block.self_attn.q_proj, PackedFirst)
    assert isinstance(block.self_attn.k_proj, PackedNext)
    assert isinstance(block.mlp.gate_proj, PackedFirst)
    assert isinstance(block.mlp.up_proj, PackedNext)
    assert isinstance(block.mlp.down_proj, DenseLinear) and isinstance(lm.lm_head, DenseLinear)
    assert isinstance(block.input_layernorm, FusedRMSNorm)
    assert not any(isinstance(m, nn.Linear | LlamaRMSNorm) for m in lm.modules())
    assert lm.lm_head.weight.data_ptr() == lm.model.embed_tokens.weight.data_ptr(), "a copy"


def test_outputs_of_a_pack_that_nobody_collected_are_noticed() -> None:
    lm = llama()
    fuse(lm, table=rope_table(256, DIM, THETA), weights="dense")
    q_proj, x = lm.model.layers[0].self_attn.q_proj, torch.zeros(1, 2, 64)
    q_proj(x)
    with pytest.raises(AssertionError):
        q_proj(x)


def test_the_8_bit_layer_takes_any_leading_shape_and_a_bias() -> None:
    weight, bias = torch.randn(24, 16), torch.randn(24)
    layer, x = Int8Linear(weight, bias), torch.randn(2, 3, 16)
    held, scale = int8.quantize_weight(weight)
    expected = functional.linear(x, held.float() * scale[:, None], bias)
    torch.testing.assert_close(layer(x), expected, rtol=1e-3, atol=2e-3)


def test_the_fused_norm_is_transformers_norm() -> None:
    norm = LlamaRMSNorm(24, eps=1e-5)
    norm.weight.data.normal_()
    x = torch.randn(5, 24) * 7
    torch.testing.assert_close(FusedRMSNorm(norm.weight, 1e-5)(x), norm(x))


def test_the_table_rotary_gives_both_halves_of_each_position() -> None:
    table = rope_table(100, DIM, THETA)
    cos, sin = TableRotary(table)(torch.zeros(1, 3, 8), torch.tensor([[0, 99, 7]]))
    assert cos.shape == sin.shape == (1, 3, DIM)
    for row, position in enumerate((0, 99, 7)):
        assert torch.equal(cos[0, row], table[position, 0].repeat(2))
        assert torch.equal(sin[0, row], table[position, 1].repeat(2))


def test_layers_of_odd_width_keep_their_own_weights() -> None:
    lm: Any = nn.Module()
    lm.model, lm.lm_head = nn.Module(), nn.Linear(7, 5, bias=False)
    lm.model.layers = nn.ModuleList()
    fuse(lm, table=rope_table(8, DIM, THETA), weights="int8")
    assert isinstance(lm.lm_head, DenseLinear)


def test_a_layer_with_another_gate_is_left_to_transformers() -> None:
    assert not any(CPULayer.fits(layer) for layer in llama(hidden_act="gelu").model.layers)

"""What heads borrow of a served model, whatever its weights were made into."""

from __future__ import annotations

import pytest
import torch

from mmserve.engine.engine import Engine
from mmserve.engine.target_parts import target_parts
from mmserve.spec.target_parts import TargetParts
from tests.engine.tiny import HIDDEN, LAYERS, VOCAB, tiny_config, tiny_lm, tiny_model


def parts_of(dtype: str, *, tied: bool = True) -> TargetParts:
    loaded = tiny_model()
    if not tied:
        loaded.lm.lm_head.weight = torch.nn.Parameter(other_matrix(), requires_grad=False)
        loaded.lm.config.tie_word_embeddings = False
    return target_parts(Engine(tiny_config(dtype=dtype), loaded).runner)


def other_matrix() -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_embeddings_rows_and_products_are_the_models(dtype: str) -> None:
    parts = parts_of(dtype)
    matrix = tiny_lm().get_input_embeddings().weight
    ids = torch.tensor([4, 200, 7])
    assert (parts.hidden_size, parts.num_layers, parts.vocab_size) == (HIDDEN, LAYERS, VOCAB)
    assert torch.equal(parts.embed(ids), matrix[ids])
    assert torch.equal(parts.head_rows(ids), matrix[ids])
    x = torch.randn(3, HIDDEN)
    close = {"float32": 1e-4, "int8": 0.3}[dtype]
    assert torch.allclose(parts.logits(x), x @ matrix.T, atol=close)
    bias = torch.randn(20)
    made = parts.linear(matrix[:20], bias)(x)
    assert torch.allclose(made, x @ matrix[:20].T + bias, atol=close)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_rows_of_a_matrix_of_its_own_are_found_where_it_is_packed(dtype: str) -> None:
    ids = torch.tensor([1, 263])
    close = {"float32": 0.0, "int8": 0.05}[dtype]
    assert torch.allclose(
        parts_of(dtype, tied=False).head_rows(ids), other_matrix()[ids], atol=close
    )

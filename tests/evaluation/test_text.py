"""The distance from the base model: none from itself, some from another."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, cast

import torch

from mmserve.evaluation import text
from mmserve.model.loader import LoadedModel
from tests.engine.tiny import tiny_model


def model() -> LoadedModel:
    found = copy.copy(cast(Any, tiny_model()))
    return cast(LoadedModel, found)


def test_a_model_is_as_far_from_itself_as_nothing() -> None:
    one = model()
    found = text.compare(one, one, 2)
    assert found.kl == 0 and found.same_best == 100 and found.prompts == 2
    assert 2 <= found.tokens <= 2 * text.ANSWER_TOKENS


def test_another_head_is_some_way_off() -> None:
    one = model()
    lm = copy.deepcopy(one.lm)
    with torch.no_grad():
        lm.model.norm.weight.mul_(1.5)
    fields = {name: getattr(one, name) for name in ("tokenizer", "spec", "device", "eos_token_ids")}
    other = cast(LoadedModel, SimpleNamespace(lm=lm, **fields))
    assert text.compare(other, one, 1).kl > 0.001

"""The GPU's choice of a token is the sampler's own; natively on a GPU, else in the interpreter."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from mmserve.engine.choice import Choice, fits
from mmserve.engine.grammar import Grammars
from mmserve.engine.sampler import Sampler, SamplingState
from mmserve.request import Constraint, SamplingParams
from mmserve.tokenizer import Tokenizer
from tests.engine.tiny import tiny_tokenizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.6, top_p=0.9),
    SamplingParams(seed=3, top_k=5),
    SamplingParams(seed=4, min_p=0.05, top_k=2**40),
    SamplingParams(seed=5, temperature=1.7, top_k=50, top_p=0.8, min_p=0.01),
    SamplingParams(seed=6, presence_penalty=1.0, logit_bias={7: 3.0}),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, logprobs=2),
]


class Kernels(Sampler):
    """A sampler that uses the kernels wherever it runs."""

    def _kernels(self, logits: Tensor) -> Choice:
        self._choice = self._choice or Choice()
        return self._choice


def states() -> list[SamplingState]:
    return [SamplingState(params, [3, 4, 4, 9], 2) for params in KINDS]


@pytest.mark.parametrize("vocab", [40, 2100])
def test_each_kind_of_row_gets_the_token_of_the_plain_sampler(vocab: int) -> None:
    plain, kernels = states(), states()
    sampler, under_test = Sampler(), Kernels()
    generator = torch.Generator().manual_seed(vocab)
    seen = set()
    for _ in range(6):
        logits = torch.randn(len(KINDS), vocab, generator=generator) * 3
        expected = sampler.sample(logits, plain)
        got = under_test.sample(logits.to(DEVICE), kernels)
        assert [t.token_id for t in got] == [t.token_id for t in expected]
        seen |= {t.token_id != int(row.argmax()) for t, row in zip(got, logits, strict=True)}
    assert seen == {True, False}, "the draws must differ from the best to mean something"


def test_constrained_rows_get_the_plain_samplers_token_out_of_what_is_allowed() -> None:
    tokenizer = Tokenizer(tiny_tokenizer(), ["<|im_end|>"])
    grammars = Grammars(tokenizer)
    allowed = {*tokenizer.encode("abcde")}
    generator = torch.Generator().manual_seed(1)
    plain, kernels = states(), states()
    for state in plain[::2] + kernels[::2]:
        state.matcher = grammars.matcher(Constraint("regex", "[a-e]+"))
    sampler, under_test = Sampler(), Kernels()
    for _ in range(4):
        logits = torch.randn(len(KINDS), 264, generator=generator) * 3
        expected = [token.token_id for token in sampler.sample(logits, plain)]
        got = [token.token_id for token in under_test.sample(logits.to(DEVICE), kernels)]
        assert got == expected and {*got[::2]} <= allowed and not {*got[1::2]} <= allowed


def test_plain_rows_get_the_best_token_the_lowest_of_equals() -> None:
    logits = torch.zeros(70, 40)
    logits[:, 11] = logits[:, 30] = 1
    greedy = [SamplingState(KINDS[0], [3], 1)] * 70
    assert {t.token_id for t in Kernels().sample(logits.to(DEVICE), greedy)} == {11}


def test_a_draw_that_float32_rounds_to_one_stays_inside_the_row() -> None:
    logits = torch.zeros(1, 40, device=DEVICE)
    params = [replace(KINDS[1], seed=None)]
    assert Choice().draw(logits, params, [1 - 2**-53]).tolist() == [39]
    assert Choice().draw(logits, params, [0.0]).tolist() == [0]


def test_the_scratch_space_grows_with_the_batch_and_follows_the_vocabulary() -> None:
    choice = Choice()
    for rows, vocab in [(1, 40), (65, 40), (3, 2100), (2, 40)]:
        logits = torch.randn(rows, vocab, device=DEVICE)
        assert choice.best(logits).tolist() == logits.argmax(-1).tolist()
    assert fits(2**18) and not fits(2**18 + 1)

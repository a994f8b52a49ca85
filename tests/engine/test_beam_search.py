"""Scores alone, over a language of few words: the search is the plain one, which looks at all."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmserve.engine.beam_search import BeamSearch
from mmserve.engine.sampler import SampledToken
from mmserve.request import BeamParams, FinishReason
from tests.engine.plain_beams import plain_beams

VOCAB = 40


class Language:
    """What follows depends on the last two words. `rare`: share of words that cannot follow."""

    def __init__(self, seed: int, rare: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(VOCAB + 1, VOCAB + 1, VOCAB, generator=generator) * 2
        out = torch.rand(self.table.shape, generator=generator) < rare
        self.table = self.table.masked_fill(out, -math.inf)
        self.table[..., 0] = self.table[..., 0].clamp(min=-3)  # something always can

    def __call__(self, said: tuple[int, ...]) -> Tensor:
        before, last = (VOCAB, VOCAB, *said)[-2:]
        return self.table[before, last].log_softmax(-1)

    def best(self, said: tuple[int, ...], count: int) -> SampledToken:
        values, ids = self(said).topk(min(count, VOCAB))
        pairs = zip(ids.tolist(), values.tolist(), strict=True)
        return SampledToken(0, None, tuple(pair for pair in pairs if pair[1] > -math.inf))


def search(language: Language, params: BeamParams, ends: frozenset[int], limit: int) -> Any:
    beams = BeamSearch(params, ends, limit)
    said: list[tuple[int, ...]] = [()]
    while said:
        found = [language.best(tokens, beams.num_wanted) for tokens in said]
        said = [(*said[row], token) for row, token in beams.step(found)]
        assert [tuple(t.token_id for t in path.tokens()) for path in beams.running] == said
    return beams.best()


@settings(max_examples=200)
@given(
    st.integers(0, 10_000),
    st.sampled_from([0.0, 0.5, 0.95]),
    st.sampled_from([(1, 1), (2, 1), (5, 1), (16, 1), (2, 2), (6, 3), (6, 2), (16, 4), (16, 16)]),
    st.sampled_from([0.0, 0.5, 3.0]),
    st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.0]),
    st.sampled_from([True, False, "never"]),
    st.sets(st.integers(0, VOCAB - 1), max_size=6),
    st.integers(1, 12),
)
def test_the_search_is_the_plain_one(
    seed: int,
    rare: float,
    shape: tuple[int, int],
    diversity: float,
    length: float,
    early: Any,
    ends: set[int],
    limit: int,
) -> None:
    width, groups = shape
    params = BeamParams(width, width, groups, diversity, length, early)
    language = Language(seed, rare)
    found = search(language, params, frozenset(ends), limit)
    wanted = plain_beams(language, params, frozenset(ends), limit)
    got = [tuple(t.token_id for t in whole.path.tokens()) for whole in found]
    values = [whole.value for whole in found]
    assert values == pytest.approx([value for value, _ in wanted])
    if len({round(value, 9) for value in values}) == len(values):  # else either order is right
        assert got == [tokens for _, tokens in wanted]
    for whole, tokens in zip(found, got, strict=True):
        assert (whole.reason is FinishReason.STOP) == (tokens[-1] in ends)


def test_wide_enough_it_finds_the_likeliest_answer_of_all() -> None:
    """Greedily the first word would be wrong."""
    language, limit = Language(3, 0.0), 2
    every = [
        (float(language(())[a] + language((a,))[b]), (a, b))
        for a in range(VOCAB)
        for b in range(VOCAB)
    ]
    (best,) = search(language, BeamParams(VOCAB, length_penalty=0.0), frozenset(), limit)
    assert tuple(t.token_id for t in best.path.tokens()) == max(every)[1]
    assert best.value == pytest.approx(max(every)[0])

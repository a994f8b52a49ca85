"""Sampler: each rule against a plain per-row statement of it, and the draws against their odds."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmserve.engine import sampler as sampler_module
from mmserve.engine.sampler import Sampler, SamplingState, filter_threshold
from mmserve.engine.sampling_limits import validate
from mmserve.errors import RequestError
from mmserve.request import SamplingParams

VOCAB = 40
GREEDY = SamplingParams(temperature=0)


def logits_of(rows: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def state(params: SamplingParams, prompt: list[int], output: list[int]) -> SamplingState:
    return SamplingState(params, [*prompt, *output], len(prompt))


def common(seed: int = 0) -> Sampler:
    return Sampler(torch.Generator().manual_seed(seed))


def plain_penalties(
    row: list[float], params: SamplingParams, prompt: list[int], output: list[int]
) -> list[float]:
    """Penalties and bias, token by token, as the module's docstring says them."""
    counts = Counter(output)
    result = []
    for token, value in enumerate(row):
        if token in {*prompt, *output}:
            r = params.repetition_penalty
            value = value / r if value > 0 else value * r
        value -= params.frequency_penalty * counts[token]
        value -= params.presence_penalty * (counts[token] > 0)
        result.append(value + params.logit_bias.get(token, 0.0))
    return result


def plain_kept(row: list[float], params: SamplingParams) -> set[int]:
    """The tokens that top-k, top-p and min-p leave, by sorting everything."""
    order = sorted(range(len(row)), key=lambda t: -row[t])
    if params.top_k:
        order = order[: params.top_k]
    weights = [math.exp(row[t] - row[order[0]]) for t in order]
    total, mass, kept = sum(weights), 0.0, []
    for token, weight in zip(order, weights, strict=True):
        kept.append(token)
        mass += weight / total
        if params.top_p < 1 and mass >= params.top_p:
            break
    return {t for t in kept if math.exp(row[t] - row[order[0]]) >= params.min_p}


TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=20)
PENALTY = st.sampled_from([-2.0, -0.5, 0.0, 0.7, 2.0])


@st.composite
def penalised(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=0,
        repetition_penalty=draw(st.sampled_from([0.5, 1.0, 1.3, 4.0])),
        presence_penalty=draw(PENALTY),
        frequency_penalty=draw(PENALTY),
        logit_bias=draw(st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-9, 9), max_size=3)),
    )


@settings(deadline=None)
@given(rows=st.lists(st.tuples(penalised(), TOKENS, TOKENS), min_size=1, max_size=4))
def test_penalties_and_bias_equal_their_plain_statement(
    rows: list[tuple[SamplingParams, list[int], list[int]]],
) -> None:
    logits = logits_of(len(rows))
    before = logits.clone()
    states = [state(*row) for row in rows]
    adjusted = Sampler()._adjust(logits, states)
    for i, (params, prompt, output) in enumerate(rows):
        expected = torch.tensor(plain_penalties(logits[i].tolist(), params, prompt, output))
        torch.testing.assert_close(adjusted[i], expected)
    assert torch.equal(logits, before), "the given logits were changed"


def test_counts_follow_a_growing_sequence() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=1.0, repetition_penalty=2.0)
    tokens = [3, 3]
    growing = SamplingState(params, tokens, num_prompt_tokens=2)
    logits = logits_of(1)
    for _ in range(12):
        fresh = SamplingState(params, list(tokens), 2)
        torch.testing.assert_close(
            Sampler()._adjust(logits, [growing]), Sampler()._adjust(logits, [fresh])
        )
        tokens.append(Sampler().sample(logits, [growing])[0].token_id)
    assert len(set(tokens[2:])) > 1, "the penalty never changed the choice"


@pytest.mark.parametrize("candidates", [4, 512])
@settings(deadline=None)
@given(
    seed=st.integers(0, 1000),
    rows=st.lists(
        st.tuples(
            st.sampled_from([0, 1, 3, 4, 5, 17, VOCAB, 100]),
            st.sampled_from([0.01, 0.3, 0.9, 0.999, 1.0]),
            st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_filters_keep_the_tokens_that_sorting_everything_keeps(
    candidates: int, seed: int, rows: list[tuple[int, float, float]]
) -> None:
    params = [SamplingParams(top_k=k, top_p=p, min_p=m) for k, p, m in rows]
    scaled = logits_of(len(rows), seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "CANDIDATES", candidates)
        lowest = filter_threshold(scaled, params)
    for row, threshold, p in zip(scaled.tolist(), lowest.flatten().tolist(), params, strict=True):
        assert {t for t, value in enumerate(row) if value >= threshold} == plain_kept(row, p)


def test_equal_logits_at_the_border_all_stay() -> None:
    scaled = torch.tensor([[5.0, 4.0, 4.0, 4.0, 1.0]])
    assert filter_threshold(scaled, [SamplingParams(top_k=2)]).item() == 4.0


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0, top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1, top_k=30, top_p=0.95),
        SamplingParams(presence_penalty=1.5, logit_bias={3: 4.0}),
    ],
)
def test_tokens_are_drawn_with_their_odds(params: SamplingParams) -> None:
    draws = 20_000
    logits = logits_of(1, seed=5)
    prompt, output = [1, 2], [3, 3, 4]
    row = plain_penalties(logits[0].tolist(), params, prompt, output)
    scaled = [value / params.temperature for value in row]
    kept = plain_kept(scaled, params)
    weights = [math.exp(v) if t in kept else 0.0 for t, v in enumerate(scaled)]
    odds = [w / sum(weights) for w in weights]

    one = state(params, prompt, output)
    counts: Counter[int] = Counter()
    sampler = common()
    for _ in range(10):
        result = sampler.sample(logits.expand(draws // 10, -1), [one] * (draws // 10))
        counts.update(token.token_id for token in result)
    assert set(counts) <= kept
    # Pearson's statistic over tokens expected at least five times; mean = freedom, so four
    # standard deviations above it happen by chance about once in ten thousand seeds.
    tested = [t for t in kept if odds[t] * draws >= 5]
    chi2 = sum((counts[t] - odds[t] * draws) ** 2 / (odds[t] * draws) for t in tested)
    freedom = max(len(tested) - 1, 1)
    assert len(tested) > 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom)


def test_a_seeded_draw_does_not_depend_on_its_neighbours() -> None:
    seeded = SamplingParams(seed=7, top_p=0.9)
    logits = logits_of(6, vocab=3000)

    def run(rows: list[int], mates: SamplingParams, seed: int) -> list[int]:
        tokens: list[int] = []
        states = [state(seeded if r == 2 else mates, [1], []) for r in rows]
        sampler = common(seed)
        for _ in range(50):
            result = sampler.sample(logits[rows], states)
            tokens.append(result[rows.index(2)].token_id)
        return tokens

    alone = run([2], GREEDY, 0)
    assert len(set(alone)) > 5
    assert run([0, 1, 2, 3], GREEDY, 1) == alone
    assert run([5, 2], SamplingParams(top_k=2999), 2) == alone
    assert run([2, 0, 4], SamplingParams(seed=8, top_p=0.99999), 3) == alone
    assert run([2], GREEDY, 4) == alone


def test_unseeded_rows_of_one_batch_are_drawn_independently() -> None:
    flat = torch.zeros(64, VOCAB)
    result = common().sample(flat, [state(SamplingParams(), [0], [])] * 64)
    assert len({token.token_id for token in result}) > 10


def test_greedy_rows_are_greedy_in_any_company() -> None:
    logits = logits_of(4)
    best = logits.argmax(-1).tolist()
    greedy = state(GREEDY, [0], [])
    tiny = state(SamplingParams(temperature=1e-9), [0], [])
    hot = state(SamplingParams(temperature=2.0), [0], [])
    assert [t.token_id for t in Sampler().sample(logits, [greedy] * 4)] == best
    mixed = Sampler().sample(logits, [greedy, hot, tiny, hot])
    assert [mixed[0].token_id, mixed[2].token_id] == [best[0], best[2]]


def test_a_low_temperature_does_not_overflow() -> None:
    logits = torch.full((1, VOCAB), -1e4)
    logits[0, 9] = 1e4
    cold = state(SamplingParams(temperature=2e-5), [0], [])
    assert Sampler().sample(logits, [cold])[0].token_id == 9


def test_logprobs_are_the_models_own_whatever_the_penalties() -> None:
    logits = logits_of(3)
    params = SamplingParams(temperature=0, logprobs=4, logit_bias={11: 100.0})
    states = [state(params, [0], []), state(GREEDY, [0], []), state(GREEDY, [0], [])]
    states[2] = state(replace(params, logprobs=0), [0], [])
    biased, silent, chosen_only = Sampler().sample(logits, states)
    expected = logits.log_softmax(-1)
    assert biased.token_id == 11
    assert biased.logprob == pytest.approx(expected[0, 11].item())
    order = expected[0].argsort(descending=True)[:4].tolist()
    assert [t for t, _ in biased.top] == order
    assert [v for _, v in biased.top] == pytest.approx(expected[0, order].tolist())
    assert silent.logprob is None and silent.top == ()
    assert chosen_only.logprob is not None and chosen_only.top == ()


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0, 2], [-0.1, 2.1, math.nan, math.inf]),
        ("top_p", [0.01, 1], [0, 1.01, math.nan]),
        ("top_k", [0, 10**6], [-1]),
        ("min_p", [0, 1], [-0.1, 1.1, math.nan]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1, math.nan]),
        ("repetition_penalty", [0.1, 10], [0, -1, 10.1, math.nan]),
        ("max_tokens", [None, 1], [0, -5]),
        ("logprobs", [None, 0, 20], [-1, 21]),
        ("seed", [None, -1, 2**63 - 1, -(2**63)], [2**63, -(2**63) - 1]),
        ("stop", [(), ("a",) * 4, ("b" * 1024,)], [("a",) * 5, ("",), ("b" * 1025,)]),
        ("stop_token_ids", [(), (0, VOCAB - 1)], [(-1,), (VOCAB,)]),
        (
            "logit_bias",
            [{}, {0: -100, VOCAB - 1: 100}],
            [{VOCAB: 0.0}, {-1: 0.0}, {0: 101.0}, {0: math.nan}],
        ),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_name(
    name: str, good: list[Any], bad: list[Any]
) -> None:
    for value in good:
        params = SamplingParams(**{name: value})
        validate(params, VOCAB)
        Sampler().sample(logits_of(1), [state(params, [0], [1])])
    for value in bad:
        with pytest.raises(RequestError) as caught:
            validate(SamplingParams(**{name: value}), VOCAB)
        assert caught.value.param == name
        assert name in caught.value.message

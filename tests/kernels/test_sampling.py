"""Sampling without a sort equals its plain statement, and that the engine's sampler; on a GPU
natively, else in Triton's interpreter."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import tests.kernels.interpreter  # noqa: F401
from mmserve.engine.sampler import filter_threshold
from mmserve.kernels import plain, sampling, threshold
from mmserve.request import SamplingParams

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SOME = settings(deadline=None, max_examples=200 if CUDA else 20)
CLOSE = 4e-6  # of a row's mass: what rounding may move a sum by
VOCABS = st.sampled_from([1, 2, 5, 255, 2048, 2049, 5000])


class Filters(NamedTuple):
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    temperature: float = 1.0

    def tensors(self, count: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of `count` equal rows, in the order `sample` takes them."""
        values = (self.temperature, self.top_k, self.top_p, self.min_p)
        kinds = (torch.float32, torch.int32, torch.float32, torch.float32)
        made = [
            torch.full((count,), value, dtype=kind, device=DEVICE)
            for value, kind in zip(values, kinds, strict=True)
        ]
        return made[0], made[1], made[2], made[3]


FILTERS = st.builds(
    Filters,
    st.sampled_from([0, 1, 2, 3, 50, 1000, 2048, 10_000]),
    st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0]),
    st.sampled_from([0.0, 0.0, 1e-3, 0.05, 0.5, 1.0]),
    st.sampled_from([0.0, 0.01, 0.3, 0.8, 1.0, 2.0]),
)


def randn(seed: int, *size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def adversary(kind: str, vocab: int, seed: int) -> Tensor:
    """A row [V] that is hard for one reason or another."""
    normal = randn(seed, vocab)
    ids = torch.arange(vocab, device=DEVICE)
    if kind == "peaked":
        return normal * 4
    if kind == "wide":
        return normal * 40
    if kind == "narrow":
        return 1 + normal * 1e-4
    if kind == "flat":
        return torch.zeros(vocab, device=DEVICE)
    if kind == "few values":
        return normal.round()
    if kind == "two values":
        return (ids % 3 == 0).float() * 2.5
    if kind == "one huge":
        return torch.where(ids == seed % vocab, 1e9, normal)
    if kind == "all huge":
        return 1e7 + 100 * normal
    if kind == "mostly forbidden":
        return torch.where(ids % 7 == seed % 7, normal * 3, -math.inf)
    if kind == "around zero":
        scale = torch.rand(vocab, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        return normal * 10 ** (-40 * scale)
    assert kind == "one step apart"
    return (torch.tensor(1.0).view(torch.int32).item() + ids.int()).view(torch.float32)


KINDS = [
    "peaked",
    "wide",
    "narrow",
    "flat",
    "few values",
    "two values",
    "one huge",
    "all huge",
    "mostly forbidden",
    "around zero",
    "one step apart",
]
ROWS = st.tuples(st.sampled_from(KINDS), FILTERS)


def run(
    logits: Tensor, parameters: tuple[Tensor, ...], uniform: Tensor
) -> tuple[list[int], sampling.Workspace]:
    work = sampling.workspace(len(logits), logits.shape[1], logits.device)
    for tensor in work:  # as a call before may have left them
        tensor.fill_(123)
    out = torch.full((len(logits),), -1, device=DEVICE)
    t, k, p, m = parameters
    sampling.sample(logits, t, k, p, m, uniform, out, work)
    return out.tolist(), work


def kept_by_kernel(scaled: Tensor, lowest: Tensor, min_p: Tensor) -> Tensor:
    best = scaled.amax()
    weights = (scaled - best).double().exp()
    return (scaled >= lowest) & (weights >= min_p) & ((min_p < 1) | (scaled == best))


def check_row(logits: Tensor, filters: Filters, uniform: float, token: int, lowest: Tensor) -> None:
    """The threshold lies between those for top_p a little less and a little more, and the token
    where the sum of probabilities reaches `uniform`. logits [V]."""
    scaled = plain.scale(logits[None], torch.full((1,), filters.temperature, device=DEVICE))
    _, k, p, m = filters.tensors()
    masses = (scaled[0] - scaled.amax()).double().exp()
    heavy = masses > 2.0**-43
    kept = kept_by_kernel(scaled[0], lowest, m) & heavy
    less, more = p - CLOSE, torch.where(p < 1, p + CLOSE, p)
    inner = plain.kept_tokens(scaled, k, less, m)[0] & heavy
    outer = plain.kept_tokens(scaled, k, more, m)[0] & heavy
    assert not bool((inner & ~kept).any()), "a token is missing"
    assert not bool((kept & ~outer).any()), "a token is too many"
    # exp's rounding may also move a token over the border of min_p.
    border = ((masses - m.double()).abs() < CLOSE * masses).any() and filters.min_p < 1
    assert bool(kept[token]) or border
    reached = masses.masked_fill(~kept, 0).cumsum(0) / masses[kept].sum()
    before = float(reached[token - 1]) if token else 0.0
    assert border or before - CLOSE <= uniform <= float(reached[token]) + CLOSE


@SOME
@given(
    rows=st.lists(ROWS, min_size=1, max_size=3),
    vocab=VOCABS,
    seed=st.integers(0, 999),
    uniform=st.sampled_from([0.0, 0.25, 0.7, 1 - 2**-24]),
)
def test_tokens_and_thresholds_are_those_of_the_plain_statement(
    rows: list[tuple[str, Filters]], vocab: int, seed: int, uniform: float
) -> None:
    logits = torch.stack([adversary(kind, vocab, seed) for kind, _ in rows])
    parameters = tuple(torch.cat(x) for x in zip(*(f.tensors() for _, f in rows), strict=True))
    tokens, work = run(logits, parameters, torch.full((len(rows),), uniform, device=DEVICE))
    for i, (_, filters) in enumerate(rows):
        if filters.temperature < 1e-5:
            best = logits[i] == logits[i].max()
            assert tokens[i] == int(best.nonzero()[0])
        else:
            check_row(logits[i], filters, uniform, tokens[i], work.lowest[i])


@SOME
@given(kind=st.sampled_from(KINDS), filters=FILTERS, vocab=VOCABS, seed=st.integers(0, 999))
def test_the_plain_filters_are_those_of_the_engines_sampler(
    kind: str, filters: Filters, vocab: int, seed: int
) -> None:
    t, k, p, m = filters._replace(temperature=filters.temperature or 1.0).tensors()
    scaled = plain.scale(adversary(kind, vocab, seed)[None], t)
    params = SamplingParams(top_k=filters.top_k, top_p=filters.top_p, min_p=filters.min_p)
    engine = (scaled >= filter_threshold(scaled, [params]))[0]
    # The engine sums float32 logarithms, which keeps six digits of a sum near 1, and compares
    # logits where masses differ by less than a float can say: at a min_p of 1 only the best stay.
    less, more = p - 1e-4 * p, torch.where(p < 1, p + 1e-4 * p, p)
    inner = plain.kept_tokens(scaled, k, less, m * (1 + 1e-5))[0]
    outer = plain.kept_tokens(scaled, k, more, m * (1 - 1e-5))[0]
    assert not bool((inner & ~engine).any())
    assert not bool((engine & ~outer).any())


def test_every_uniform_gives_the_plain_token() -> None:
    count, vocab = 12, 2100
    logits = randn(1, vocab).expand(count, vocab)
    parameters = Filters(top_k=30, top_p=0.93, temperature=0.9).tensors(count)
    uniform = torch.linspace(0, 0.999, count, device=DEVICE)
    tokens, _ = run(logits, parameters, uniform)
    expected = torch.empty(count, dtype=torch.long, device=DEVICE)
    plain.sample(logits, *parameters, uniform, expected)
    assert tokens == expected.tolist()
    assert len(set(tokens)) > 4


def test_equals_at_the_border_of_top_k_all_stay() -> None:
    logits = torch.tensor([[5.0, 4.0, 4.0, 4.0, 1.0]], device=DEVICE)
    _, work = run(logits, Filters(top_k=2).tensors(), torch.zeros(1, device=DEVICE))
    assert work.lowest.item() == 4.0
    token, _ = run(logits, Filters(top_k=2).tensors(), torch.full((1,), 0.9999, device=DEVICE))
    assert token == [3]


@pytest.mark.parametrize(("top_k", "border"), [(2, 0.4 / 0.6), (3, 0.4 / 0.8), (4, 0.4)])
def test_equals_beyond_top_k_do_not_weigh_in_top_p(top_k: int, border: float) -> None:
    """Of [a, b, b, b] top-k 2 weighs a + b. Where a / (a + b) is above top_p, b goes."""
    logits = torch.log(torch.tensor([[0.4, 0.2, 0.2, 0.2]], device=DEVICE))
    for token, top_p in enumerate((border - 0.01, border + 0.01)):
        _, work = run(logits, Filters(top_k, top_p).tensors(), torch.zeros(1, device=DEVICE))
        assert work.lowest.item() == logits[0, token].item()


@pytest.mark.parametrize(("min_p", "last"), [(0.0, 2), (0.3, 2), (0.5, 1), (0.61, 0), (1.0, 0)])
def test_min_p_is_a_share_of_the_best(min_p: float, last: int) -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]], device=DEVICE))
    almost = torch.full((1,), 0.9999, device=DEVICE)
    token, _ = run(logits, Filters(min_p=min_p).tensors(), almost)
    assert token == [last]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_a_draw_passes_over_chunks_without_mass(uniform: float) -> None:
    logits = randn(12, 1, 3 * threshold.CHUNK)
    best = threshold.CHUNK + 5
    logits[0, best] = 9.0
    token, _ = run(logits, Filters(top_k=1).tensors(), torch.full((1,), uniform, device=DEVICE))
    assert token == [best]


def test_among_thousands_the_list_holds_few_and_the_threshold_is_exact() -> None:
    rows = [
        Filters(0, 0.9),
        Filters(0, 0.5, temperature=2.0),
        Filters(3000),
        Filters(50, 0.9),
        Filters(4000, 0.7),
        Filters(10_000, 0.999),
    ]
    logits = randn(11, len(rows), 5000)
    parameters = tuple(torch.cat(x) for x in zip(*(f.tensors() for f in rows), strict=True))
    uniform = torch.linspace(0.05, 0.95, len(rows), device=DEVICE)
    tokens, work = run(logits, parameters, uniform)
    for i, filters in enumerate(rows):
        check_row(logits[i], filters, uniform[i].item(), tokens[i], work.lowest[i])
    # A range is 1/31 wide: of 5000 normal logits, halved, at most about 130 lie so close together.
    assert max(work.listed[[0, 1, 2]].tolist()) < 170


@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_a_list_that_overflows_is_searched_in_the_row(top_p: float) -> None:
    vocab = threshold.CAPACITY + 3000
    logits = adversary("one step apart", vocab, 0)
    logits = logits[torch.randperm(vocab, generator=torch.Generator().manual_seed(2))]
    logits[7] = 6.0
    filters = Filters(top_k=5000, top_p=top_p)
    tokens, work = run(logits[None], filters.tensors(), torch.full((1,), 0.5, device=DEVICE))
    assert work.listed.item() > threshold.CAPACITY
    check_row(logits, filters, 0.5, tokens[0], work.lowest[0])


@pytest.mark.parametrize(
    "row",
    [
        [math.nan] * 4,
        [1.0, math.nan, 3.0, 2.0],
        [-math.inf] * 4,
        [math.inf, 0.0, math.inf, -1.0],
    ],
)
@pytest.mark.parametrize("filters", [Filters(), Filters(2, 0.5, 0.1), Filters(temperature=0.0)])
def test_logits_that_are_no_numbers_still_give_a_token(row: list[float], filters: Filters) -> None:
    logits = torch.tensor([row], device=DEVICE)
    for uniform in (0.0, 0.99999):
        tokens, _ = run(logits, filters.tensors(), torch.full((1,), uniform, device=DEVICE))
        assert 0 <= tokens[0] < 4
        if 3.0 in row and filters.temperature == 0:
            assert tokens == [2]


def test_a_row_has_the_same_token_alone_and_in_a_batch() -> None:
    count, vocab = 8, 4500
    logits = torch.stack([adversary(KINDS[i], vocab, i) for i in range(count)])
    rows = [Filters(), Filters(40, 0.9), Filters(0, 0.8), Filters(3)] * 2
    parameters = tuple(torch.cat(x) for x in zip(*(f.tensors() for f in rows), strict=True))
    uniform = torch.linspace(0.1, 0.9, count, device=DEVICE)
    together, work = run(logits, parameters, uniform)
    for i in range(count):
        own = tuple(x[i : i + 1] for x in parameters)
        alone, own_work = run(logits[i : i + 1], own, uniform[i : i + 1])
        assert alone[0] == together[i]
        assert torch.equal(own_work.lowest[0], work.lowest[i])


def test_a_workspace_serves_smaller_batches_and_rows_that_are_slices() -> None:
    vocab = 2100
    work = sampling.workspace(5, vocab, torch.device(DEVICE))
    logits = randn(3, 4, vocab + 60)[:, :vocab]
    out, expected = (torch.empty(4, dtype=torch.long, device=DEVICE) for _ in range(2))
    parameters, uniform = Filters(20, 0.9).tensors(4), torch.full((4,), 0.6, device=DEVICE)
    plain.sample(logits, *parameters, uniform, expected)
    for _ in range(2):
        sampling.sample(logits, *parameters, uniform, out, work)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, *([torch.bfloat16] if CUDA else [])])
def test_the_best_of_equals_is_the_lowest_id(dtype: torch.dtype) -> None:
    vocab = 2 * threshold.CHUNK + 9
    logits = randn(4, 4, vocab).to(dtype)
    logits[0, [4099, 2050, 4104]] = 50.0
    logits[1] = -math.inf
    logits[2, [7, 9]] = math.inf
    out, expected = (torch.empty(4, dtype=torch.long, device=DEVICE) for _ in range(2))
    sampling.argmax(logits, out, sampling.workspace(4, vocab, torch.device(DEVICE)))
    plain.argmax(logits, expected)
    assert torch.equal(out, expected)
    assert out[:3].tolist() == [2050, 0, 7]

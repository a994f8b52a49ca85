"""The fused GPU kernels equal their plain statements: on a GPU natively, else in Triton's
interpreter."""

from __future__ import annotations

import os
from types import ModuleType
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import tests.kernels.interpreter  # noqa: F401
from mmserve.kernels import fused, plain
from mmserve.kernels.kv_formats import Pages
from mmserve.kernels.reference import NOWHERE, rope_table, vision_slot

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]
# Two roundings to the dtype may differ where float32 sums differ in their last bits.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
UNTOUCHED = 77.0
MAX_POSITION = 1_000_003

SOME = settings(deadline=None, max_examples=60 if CUDA else 20)
TOKENS, SEEDS, TYPES = st.integers(0, 9), st.integers(0, 999), st.sampled_from(DTYPES)


def randn(seed: int, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return made.to(DEVICE, dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    bound = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=bound, atol=bound)


@pytest.fixture(scope="module")
def far_table() -> Tensor:
    return rope_table(MAX_POSITION, 64, 10_000.0).to(DEVICE)


@SOME
@given(
    count=TOKENS,
    width=st.sampled_from([1, 2, 80, 128, 576, 1000, 4096]),
    dtype=TYPES,
    adds=st.sampled_from(["nothing", "x", "x normalised"]),
    seed=SEEDS,
)
def test_norm_of_a_sum_equals_its_plain_statement(
    count: int, width: int, dtype: torch.dtype, adds: str, seed: int
) -> None:
    x = None if adds == "nothing" else randn(seed, count, width, dtype=dtype)
    residual, weight = randn(seed + 1, count, width, dtype=dtype), randn(seed + 2, width)
    after = (randn(seed + 3, width, dtype=dtype), 1e-6) if adds == "x normalised" else None
    expected_residual = residual.clone()
    out, expected = torch.empty_like(residual), torch.empty_like(residual)
    plain.add_rms_norm(x, expected_residual, weight, 1e-5, expected, after)
    fused.add_rms_norm(x, residual, weight, 1e-5, out, after)
    if after is None:
        assert torch.equal(residual, expected_residual)
    assert_close(residual, expected_residual)
    assert_close(out, expected)


@SOME
@given(count=TOKENS, width=st.sampled_from([1, 80, 576, 1000]), dtype=TYPES, seed=SEEDS)
def test_adding_what_is_normalised_equals_its_plain_statement(
    count: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    x, residual = (randn(seed + n, count, width, dtype=dtype) for n in (0, 1))
    weight, expected = randn(seed + 2, width), residual.clone()
    plain.add_normed(x, expected, weight, 1e-6)
    fused.add_normed(x, residual, weight, 1e-6)
    assert_close(residual, expected)


def test_the_widest_row_is_normalised_whole() -> None:
    residual, weight = randn(1, 2, fused.MAX_WIDTH), randn(2, fused.MAX_WIDTH)
    residual[:, -1] = 1000.0  # without it the root mean square would be an eighth of this
    out, expected = torch.empty_like(residual), torch.empty_like(residual)
    plain.add_rms_norm(None, residual, weight, 1e-6, expected)
    fused.add_rms_norm(None, residual, weight, 1e-6, out)
    assert_close(out, expected)


def test_squares_are_summed_in_float32() -> None:
    """A square of 300 does not fit into float16."""
    residual = torch.full((1, 64), 300.0, dtype=torch.float16, device=DEVICE)
    out = torch.empty_like(residual)
    fused.add_rms_norm(None, residual, torch.ones(64, device=DEVICE), 0.0, out)
    assert_close(out, torch.ones_like(out))


def test_rows_may_be_slices_of_wider_tensors() -> None:
    wide = randn(5, 3, 200)
    x, residual = wide[:, :72], wide[:, 100:172]
    expected_residual, weight = residual.clone(), randn(6, 72)
    out, expected = torch.full((3, 90), UNTOUCHED, device=DEVICE), residual.clone()
    plain.add_rms_norm(x, expected_residual, weight, 1e-5, expected)
    before = wide.clone()
    fused.add_rms_norm(x, residual, weight, 1e-5, out[:, :72])
    assert_close(out[:, :72], expected)
    assert torch.equal(residual, expected_residual)
    assert bool((out[:, 72:] == UNTOUCHED).all())
    assert torch.equal(wide[:, 172:], before[:, 172:])


class Turn:
    """Inputs and outputs of one `rotate_store`."""

    def __init__(
        self,
        seed: int,
        slots: list[int],
        *,
        heads: tuple[int, int] = (4, 2),
        dim: int = 64,
        page: int = 4,
        dtype: torch.dtype = torch.float32,
        index: torch.dtype = torch.int64,
        norm: bool = False,
        rotary: int | None = None,
    ) -> None:
        count, (q_heads, kv_heads) = len(slots), heads
        self.rotary = rotary
        generator = torch.Generator().manual_seed(seed)
        self.qkv = randn(seed, count, (q_heads + 2 * kv_heads) * dim, dtype=dtype)
        self.positions = torch.randint(0, 50, (count,), generator=generator).to(DEVICE, index)
        self.slots = torch.tensor(slots, dtype=index, device=DEVICE)
        self.table = rope_table(50, dim, 10_000.0).to(DEVICE)
        self.turns: fused.Turns | None = None
        weights = randn(seed + 1, 2, dim).unbind(0)
        self.norm = fused.HeadNorm(weights[0], weights[1], 1e-6) if norm else None
        self.q = torch.full((count, q_heads, dim), UNTOUCHED, dtype=dtype, device=DEVICE)
        # As in pools: one layer of several, K beside V.
        self.text, self.vision = (
            torch.full((2, 2, kv_heads, pages, page, dim), UNTOUCHED, dtype=dtype, device=DEVICE)
            for pages in (6, 5)
        )

    def run(self, module: ModuleType) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q, text pool, vision pool."""
        q, text, vision = self.q.clone(), self.text.clone(), self.vision.clone()
        pools = Pages(*text[1]), Pages(*vision[1])
        turns = self.turns or fused.Turns.by_table(self.table, self.positions)
        module.rotate_store(self.qkv, turns, self.slots, q, *pools, self.norm, self.rotary)
        return q, text, vision


@SOME
@given(
    slots=st.lists(
        st.integers(vision_slot(14), 17).filter(lambda s: s != NOWHERE), max_size=9, unique=True
    ),
    pads=st.integers(0, 3),
    heads=st.sampled_from([(4, 4), (4, 2), (7, 1), (1, 1)]),
    dim=st.sampled_from([64, 80, 96, 128, 256]),
    part=st.sampled_from([None, 2, 32, 48]),
    page=st.sampled_from([3, 16]),
    dtype=TYPES,
    index=st.sampled_from([torch.int32, torch.int64]),
    norm=st.booleans(),
    seed=SEEDS,
)
def test_rotation_and_store_equal_their_plain_statement(
    slots: list[int],
    pads: int,
    heads: tuple[int, int],
    dim: int,
    part: int | None,
    page: int,
    dtype: torch.dtype,
    index: torch.dtype,
    norm: bool,
    seed: int,
) -> None:
    turn = Turn(
        seed,
        [*slots, *[NOWHERE] * pads],
        heads=heads,
        dim=dim,
        page=page,
        dtype=dtype,
        index=index,
        norm=norm,
        rotary=part,
    )
    for actual, expected in zip(turn.run(fused), turn.run(plain), strict=True):
        assert_close(actual, expected)


def places(pool: Tensor) -> set[tuple[int, int, int]]:
    """(layer, page, offset) of what was written, in K and V of all heads."""
    written = (pool != UNTOUCHED).all(-1)
    assert torch.equal(written.any(1).any(1), written.all(1).all(1))
    return {(layer, page, at) for layer, _, _, page, at in written.nonzero().tolist()}


def test_a_slot_names_its_pool_or_none() -> None:
    turn = Turn(3, [NOWHERE, 5, vision_slot(7), NOWHERE, 0, vision_slot(0)])
    q, text, vision = turn.run(fused)
    assert bool((q != UNTOUCHED).all()), "who is not stored asks all the same"
    assert places(text) == {(1, 1, 1), (1, 0, 0)}
    assert places(vision) == {(1, 1, 3), (1, 0, 0)}


@SOME
@given(
    slots=st.lists(st.integers(vision_slot(14), 17), max_size=9, unique=True),
    dim=st.sampled_from([6, 64, 80]),
    dtype=TYPES,
    seed=SEEDS,
)
def test_storing_alone_equals_its_plain_statement(
    slots: list[int], dim: int, dtype: torch.dtype, seed: int
) -> None:
    turn = Turn(seed, slots, dim=dim, page=3, dtype=dtype)
    packed = turn.qkv.view(len(slots), 8, dim)
    k, v = packed[:, 4:6], packed[:, 6:].transpose(0, 1).contiguous().transpose(0, 1)
    written = []
    for module in (fused, plain):
        text, vision = turn.text.clone(), turn.vision.clone()
        module.store(k, v, turn.slots, Pages(*text[1]), Pages(*vision[1]))
        written.append((text, vision))
    assert all(torch.equal(a, b) for a, b in zip(*written, strict=True))


def test_values_are_stored_as_they_are() -> None:
    turn = Turn(4, [6, vision_slot(6)], dtype=torch.float16)
    for row, pool in enumerate(turn.run(fused)[1:]):
        assert torch.equal(pool[1, 1, :, 1, 2], turn.qkv[row].view(-1, 64)[6:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_models_own_cosines_turn_as_the_table_does(dtype: torch.dtype) -> None:
    """They come by token, for both halves at once, in the model's dtype."""
    turn = Turn(6, [3, vision_slot(1), NOWHERE])
    by_token = turn.table[turn.positions].to(dtype)
    expected = Turn(6, [3, vision_slot(1), NOWHERE])
    expected.table, expected.positions = by_token.float(), torch.arange(3, device=DEVICE)
    turn.turns = fused.Turns(*(torch.cat((x, x), -1) for x in by_token.unbind(1)))
    for module in (fused, plain):
        for actual, right in zip(turn.run(module), expected.run(plain), strict=True):
            assert_close(actual, right)


def test_far_positions_are_turned_by_the_table(far_table: Tensor) -> None:
    turn = Turn(5, [0, 1, 2])
    turn.table = far_table
    turn.positions = torch.tensor([MAX_POSITION - 1, 999_999, 1], device=DEVICE)
    for actual, expected in zip(turn.run(fused), turn.run(plain), strict=True):
        assert_close(actual, expected)


@SOME
@given(
    count=TOKENS,
    width=st.sampled_from([1, 80, 1024, 1536, 2050]),  # below, at and above a program's chunk
    dtype=TYPES,
    gate=st.sampled_from(get_args(fused.Gate)),
    seed=SEEDS,
)
def test_gating_equals_its_plain_statement(
    count: int, width: int, dtype: torch.dtype, gate: fused.Gate, seed: int
) -> None:
    both = randn(seed, count, 2 * width, dtype=dtype)
    out, expected = (torch.empty(count, width, dtype=dtype, device=DEVICE) for _ in range(2))
    plain.gated_mul(both, expected, gate)
    fused.gated_mul(both, out, gate)
    assert_close(out, expected)


@pytest.mark.parametrize("gate", get_args(fused.Gate))
def test_gating_saturates_without_overflow(gate: fused.Gate) -> None:
    """Also where a cube does not fit into float32."""
    both = torch.tensor([[-1e30, -200.0, 200.0, 1e30, 1.0, 1.0, 1.0, 1.0]], device=DEVICE)
    out = torch.empty(1, 4, device=DEVICE)
    fused.gated_mul(both, out, gate)
    assert_close(out, torch.tensor([[0.0, 0.0, 200.0, 1e30]], device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype) -> None:
    residual, weight = randn(8, 9, 576, dtype=dtype), randn(9, 576)
    out, alone = torch.empty_like(residual), torch.empty_like(residual)
    fused.add_rms_norm(None, residual, weight, 1e-5, out)
    for t in range(9):
        fused.add_rms_norm(None, residual[t : t + 1], weight, 1e-5, alone[t : t + 1])
    assert torch.equal(out, alone)

    together, one_by_one = out.clone(), out.clone()
    fused.add_normed(residual, together, weight, 1e-6)
    for t in range(9):
        fused.add_normed(residual[t : t + 1], one_by_one[t : t + 1], weight, 1e-6)
    assert torch.equal(together, one_by_one)

    turn = Turn(8, list(range(9)), dtype=dtype, norm=True)
    q, text, _ = turn.run(fused)
    qkv, positions, slots = turn.qkv, turn.positions, turn.slots
    for t in range(9):
        turn.qkv, turn.positions = qkv[t : t + 1], positions[t : t + 1]
        turn.slots, turn.q = slots[t : t + 1], q[t : t + 1].clone().fill_(UNTOUCHED)
        own_q, own_text, _ = turn.run(fused)
        assert torch.equal(own_q[0], q[t])
        page, offset = divmod(int(slots[t]), 4)
        assert torch.equal(own_text[:, :, :, page, offset], text[:, :, :, page, offset])

"""Which pool's keys a run of them is, and in which format, in Triton.

Owns the way from one of three pools, text, its residual and images, each in a format of its own by
its code in mmserve.kernels.unpacking, to the loop that reads it. Knows nothing of work items.
"""

# Kernels are typed by what they are launched with.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from mmserve.kernels.packed_keys import run_packed
from mmserve.kernels.plain_keys import run_keys
from mmserve.kernels.unpacking import PLAIN


@triton.jit
def _run(
    state_m, state_l, acc, q_a, q_b, q, at, ok, scale, rope, base, turned, keys, values, table,
    first, last, all_first, all_last, lo, hi, tree,
    FORM: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr, TREES: tl.constexpr, CAP: tl.constexpr,
    PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """`run_keys` or `run_packed` with the queries q_a, q_b, which stand `at` [M] in q and are
    turned back by base [M] if `turned`. FORM: a pool's format, the bytes of its tiles and the
    tokens of its pages."""
    CODE: tl.constexpr = FORM[0]
    TILE: tl.constexpr = FORM[1]
    PAGE: tl.constexpr = FORM[2]
    if CODE == PLAIN:
        kind = q.dtype.element_ty
        state_m, state_l, acc = run_keys(
            state_m, state_l, acc, q_a.to(kind), q_b.to(kind), keys, values, table, first, last,
            all_first, all_last, lo, hi, tree, D, HALF, WIDE, PAGE, BLOCK_N, TREES, CAP, PRECISION,
        )  # fmt: skip
    else:
        state_m, state_l, acc = run_packed(
            state_m, state_l, acc, q, at, ok, scale, rope, base, turned, keys, values, table,
            first, last, all_first, all_last, lo, hi, tree,
            CODE, D, WIDE, PAGE, TILE, BLOCK_N, TREES, CAP, ASSEMBLY,
        )  # fmt: skip
    return state_m, state_l, acc


@triton.jit
def stored(
    state_m, state_l, acc, q_a, q_b, q, at, ok, scale, rope, base, turned, visual,
    k_own, v_own, k_vision, v_vision, table, first, last, all_first, all_last, lo, hi, tree,
    OWN_FORM: tl.constexpr, VISION_FORM: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_N: tl.constexpr, TREES: tl.constexpr, CAP: tl.constexpr,
    PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """`_run` over a head's keys in the vision pool, if `visual`, or in the own one."""
    ALIKE: tl.constexpr = OWN_FORM == VISION_FORM
    keys = k_own
    values = v_own
    if ALIKE:  # one loop serves both
        if visual:
            keys = k_vision
            values = v_vision
    if ALIKE or not visual:
        state_m, state_l, acc = _run(
            state_m, state_l, acc, q_a, q_b, q, at, ok, scale, rope, base, turned, keys, values,
            table, first, last, all_first, all_last, lo, hi, tree,
            OWN_FORM, D, HALF, WIDE, BLOCK_N, TREES, CAP, PRECISION, ASSEMBLY,
        )  # fmt: skip
    else:
        state_m, state_l, acc = _run(
            state_m, state_l, acc, q_a, q_b, q, at, ok, scale, rope, base, turned,
            k_vision, v_vision, table, first, last, all_first, all_last, lo, hi, tree,
            VISION_FORM, D, HALF, WIDE, BLOCK_N, TREES, CAP, PRECISION, ASSEMBLY,
        )  # fmt: skip
    return state_m, state_l, acc


@triton.jit
def read(
    state_m, state_l, acc, q_a, q_b, q, at, ok, scale, rope, base, turned, visual, newest,
    k_own, v_own, k_vision, v_vision, k_rest, v_rest, table, first, last, all_first, all_last,
    lo, hi, tree, OWN_FORM: tl.constexpr, VISION_FORM: tl.constexpr, REST_FORM: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr,
    TREES: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """The same, or over those in the residual, if `newest`; REST_FORM's pages have no tokens where
    there is none."""
    if REST_FORM[2] == 0:
        state_m, state_l, acc = stored(
            state_m, state_l, acc, q_a, q_b, q, at, ok, scale, rope, base, turned, visual,
            k_own, v_own, k_vision, v_vision, table, first, last, all_first, all_last, lo, hi, tree,
            OWN_FORM, VISION_FORM, D, HALF, WIDE, BLOCK_N, TREES, CAP, PRECISION, ASSEMBLY,
        )  # fmt: skip
    else:
        if newest:
            state_m, state_l, acc = _run(
                state_m, state_l, acc, q_a, q_b, q, at, ok, scale, rope, base, turned,
                k_rest, v_rest, table, first, last, all_first, all_last, lo, hi, tree,
                REST_FORM, D, HALF, WIDE, BLOCK_N, TREES, CAP, PRECISION, ASSEMBLY,
            )  # fmt: skip
        else:
            state_m, state_l, acc = stored(
                state_m, state_l, acc, q_a, q_b, q, at, ok, scale, rope, base, turned, visual,
                k_own, v_own, k_vision, v_vision, table, first, last, all_first, all_last, lo, hi,
                tree, OWN_FORM, VISION_FORM, D, HALF, WIDE, BLOCK_N, TREES, CAP, PRECISION,
                ASSEMBLY,
            )  # fmt: skip
    return state_m, state_l, acc

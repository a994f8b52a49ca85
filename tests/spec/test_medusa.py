"""Medusa's heads in their public layouts, and the trees that they draft."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from mmserve.spec.drafter import Wanted
from mmserve.spec.head_files import HeadError, read_head, write_head
from mmserve.spec.medusa import Medusa, MedusaDrafter, best_tree, load_medusa
from tests.spec.heads import HIDDEN, VOCAB, context, parts, told

PARTS = parts()
CONFIG = {"medusa_num_heads": 3, "medusa_num_layers": 1}


def blocks(prefix: str = "{h}.0.linear.{part}") -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {
        prefix.format(h=h, part=part): torch.randn(HIDDEN, HIDDEN)[
            : None if part == "weight" else 1
        ]
        .squeeze(0)
        .clone()
        for h in range(3)
        for part in ("weight", "bias")
    }


def medusa(folder: Path, tensors: dict[str, Tensor]) -> Medusa:
    write_head(folder, CONFIG, tensors)
    return load_medusa(read_head(folder), PARTS)


@pytest.mark.parametrize(
    ("names", "matrix"),
    [
        ("{h}.0.linear.{part}", "{h}.1.weight"),
        ("medusa_head.{h}.0.linear.{part}", "medusa_head.{h}.1.weight"),
        ("blocks.{h}.layers.0.{part}", "lm_heads.{h}.weight"),
    ],
)
def test_a_public_checkpoint_is_loaded_with_its_own_matrices(
    tmp_path: Path, names: str, matrix: str
) -> None:
    own = {matrix.format(h=h): torch.randn(VOCAB, HIDDEN) for h in range(3)}
    loaded = medusa(tmp_path, {**blocks(names), **own})
    hidden = torch.randn(4, HIDDEN)
    weight, bias = (blocks(names)[names.format(h=1, part=p)] for p in ("weight", "bias"))
    state = hidden + functional.silu(functional.linear(hidden, weight, bias))
    want = state @ own[matrix.format(h=1)].T
    assert torch.allclose(loaded.scores(hidden)[:, 1], want, atol=1e-4)


def test_without_matrices_the_models_own_scores(tmp_path: Path) -> None:
    loaded = medusa(tmp_path, blocks())
    hidden = torch.randn(2, HIDDEN)
    scores = loaded.scores(hidden)
    assert scores.shape == (2, 3, VOCAB)
    assert torch.allclose(scores[:, 2], PARTS.logits(loaded.heads(hidden)[:, 2]), atol=1e-4)


def test_heads_of_another_width_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadError, match="no Medusa heads of this model"):
        medusa(tmp_path, {n: t[..., :8].clone() for n, t in blocks().items()})
    with pytest.raises(HeadError, match="no Medusa heads of this model"):
        medusa(tmp_path / "none", {"0.1.linear.weight": torch.zeros(2, 2)})


def test_a_chain_is_each_heads_best_guess_from_the_last_state(tmp_path: Path) -> None:
    loaded = medusa(tmp_path, blocks())
    drafter, states = MedusaDrafter(loaded), torch.randn(5, HIDDEN)
    who = context("a", [1, 2, 3, 4, 5, 6])
    assert drafter.propose([Wanted(who, 2)]) == [None]
    drafter.landed(who, told(0, states))
    (draft,) = drafter.propose([Wanted(who, 9)])
    assert draft is not None and draft.is_chain
    assert list(draft.tokens) == loaded.scores(states[-1:])[0].argmax(-1).tolist()
    (short,) = drafter.propose([Wanted(who, 2)])
    assert short is not None and short.tokens == draft.tokens[:2]
    drafter.end(who)
    assert drafter.propose([Wanted(who, 2)]) == [None]


def test_a_tree_holds_the_chain_and_no_more_than_was_asked(tmp_path: Path) -> None:
    loaded = medusa(tmp_path, blocks())
    drafter, states = MedusaDrafter(loaded, most=20), torch.randn(1, HIDDEN)
    who = context("a", [1, 2])
    drafter.landed(who, told(0, states))
    (draft,) = drafter.propose([Wanted(who, 2)])
    assert draft is not None and len(draft) == 20 and max(draft.depths) == 2


@given(
    st.lists(st.lists(st.floats(0.01, 1), min_size=1, max_size=5), min_size=1, max_size=4),
    st.integers(1, 30),
)
def test_a_tree_is_of_the_likeliest_lines(weights: list[list[float]], most: int) -> None:
    chances = [sorted((math.log(w / sum(row)) for w in row), reverse=True) for row in weights]
    tokens = [list(range(len(row))) for row in chances]
    draft = best_tree(chances, tokens, most)
    every = sorted(_all_lines(chances), reverse=True)
    found = []
    for number in range(len(draft)):
        line, at = 0.0, number
        while at >= 0:
            line += chances[draft.depths[at] - 1][draft.tokens[at]]
            at = draft.parents[at]
        found.append(line)
    assert len(draft) == min(most, len(every))
    assert all(a >= b - 1e-9 for a, b in pairwise(found))
    assert found == pytest.approx(every[: len(found)])


def _all_lines(chances: list[list[float]]) -> list[float]:
    lines, last = [], [0.0]
    for row in chances:
        last = [line + chance for line in last for chance in row]
        lines += last
    return lines

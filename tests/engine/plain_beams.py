"""Beam search said plainly: every next token of every beam is looked at, nothing is kept between.

Follows transformers' rules (`GenerationMixin._beam_search`), and for groups those of its former
`_group_beam_search`: each group searches for itself, and pays for tokens that groups before it have
just chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from mmserve.request import BeamParams

Tokens = tuple[int, ...]
Logprobs = Callable[[Tokens], Tensor]  # of what follows these, [vocab_size]


@dataclass
class _Group:
    running: dict[Tokens, float] = field(default_factory=lambda: {(): 0.0})
    whole: list[tuple[float, Tokens]] = field(default_factory=list)
    open: bool = True


def plain_beams(
    logprobs: Logprobs, params: BeamParams, ends: frozenset[int], limit: int
) -> list[tuple[float, Tokens]]:
    """The answers to return with their values, best first."""
    size = params.width // params.groups
    groups = [_Group() for _ in range(params.groups)]
    for length in range(1, limit + 1):
        said: list[int] = []
        for group in filter(lambda g: g.open, groups):
            _step(group, said, logprobs, params, ends, (length, limit, size))
            said += [tokens[-1] for tokens in group.running]
    whole = sorted((w for g in groups for w in g.whole), key=lambda w: -w[0])
    return whole[: params.count]


def _step(
    group: _Group,
    said: list[int],
    logprobs: Logprobs,
    params: BeamParams,
    ends: frozenset[int],
    lengths: tuple[int, int, int],
) -> None:
    length, limit, size = lengths
    scored: list[tuple[float, Tokens]] = []
    for tokens, score in group.running.items():
        for token, logprob in enumerate(logprobs(tokens).tolist()):
            if logprob > -math.inf:
                likeness = params.diversity_penalty * said.count(token)
                scored.append((score + logprob - likeness, (*tokens, token)))
    scored.sort(key=lambda pair: -pair[0])
    over = [t[-1] in ends or length == limit for _, t in scored]
    for (score, tokens), is_over in zip(scored[:size], over, strict=False):
        if is_over:
            group.whole.append((score / length**params.length_penalty, tokens))
    group.whole = sorted(group.whole, key=lambda w: -w[0])[:size]
    going = [pair for pair, is_over in zip(scored, over, strict=True) if not is_over][:size]
    group.running = {tokens: score for score, tokens in going}
    full = len(group.whole) == size
    furthest = params.early_stopping == "never" and params.length_penalty > 0
    hope = (going[0][0] if going else -math.inf) / (limit if furthest else length) ** (
        params.length_penalty
    )
    hopeless = full and hope <= group.whole[-1][0]
    if not going or hopeless or (full and params.early_stopping is True):
        group.open, group.running = False, {}

"""Beam search: which of several answers to a prompt go on, and which are whole.

Owns their scores and order: as transformers has them in `generate(num_beams=...)`, and with groups
as its group beam search had them. Knows nothing of pages, tensors or text.

Each running answer is told its best next tokens; of all that this could give, the best go on. What
ends counts only if it is among the best: the others are there so that enough remain to go on with.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from mmserve.engine.sampler import SampledToken
from mmserve.request import BeamParams, FinishReason


@dataclass(frozen=True, eq=False)
class Path:
    """An answer so far: a token behind another path. `logprob`: the token's own, `rivals`: the best
    in its place; `score`: of all tokens, less what their likeness to other groups' has cost."""

    parent: Path | None = None
    token_id: int = -1  # the empty path's
    logprob: float = 0.0
    rivals: tuple[tuple[int, float], ...] = ()
    score: float = 0.0
    length: int = 0

    def tokens(self) -> list[SampledToken]:
        """From the first to the last."""
        back = list(self.back())
        return [SampledToken(p.token_id, p.logprob, p.rivals) for p in reversed(back)]

    def back(self) -> Iterator[Path]:
        """From the last token to the first."""
        path = self
        while path.parent is not None:
            yield path
            path = path.parent


@dataclass(frozen=True, eq=False)
class Whole:
    """An answer that has ended. `value`: its score by its length, the higher the better."""

    path: Path
    value: float
    reason: FinishReason


@dataclass
class _Group:
    """`running`, best first; `rows`: where what is found of each of them stands."""

    size: int
    running: list[Path] = field(default_factory=lambda: [Path()])
    rows: list[int] = field(default_factory=lambda: [0])
    whole: list[Whole] = field(default_factory=list)


class BeamSearch:
    """One request's. The empty answer is its only one at first."""

    def __init__(
        self,
        params: BeamParams,
        ends: frozenset[int],
        limit: int,
        stops: Callable[[Path], bool] = lambda path: False,
    ) -> None:
        """`ends`: tokens behind which nothing comes; `limit`: tokens of an answer at most;
        `stops`: whether one ends with its last token, whatever that is."""
        self._params, self._ends, self._limit, self._stops = params, ends, limit, stops
        size = params.width // params.groups
        self._groups = [_Group(size) for _ in range(params.groups)]
        self._kept = max(2, 1 + len(ends)) * size  # of which `size` surely do not end

    @property
    def num_wanted(self) -> int:
        """How many best next tokens of each running answer have to be known: those that other
        groups have chosen may lose their place."""
        return self._kept + self._params.width - self._groups[0].size

    @property
    def running(self) -> list[Path]:
        return [path for group in self._groups for path in group.running]

    def step(self, found: Sequence[SampledToken]) -> list[tuple[int, int]]:
        """Go on by a token. `found`: of each running answer, in order, `num_wanted` best tokens as
        `top`. Which of them go on, by number, and with which token: the new `running`, in order;
        none, when the search is over."""
        picks: list[tuple[int, int]] = []
        taken: Counter[int] = Counter()
        for group in self._groups:
            if not group.running:
                continue
            new = self._step(group, found, taken)
            group.rows = list(range(len(picks), len(picks) + len(new)))
            picks += new
            taken.update(token for _, token in new)
        return picks

    def best(self) -> list[Whole]:
        """The answers to return, best first."""
        whole = [answer for group in self._groups for answer in group.whole]
        return sorted(whole, key=lambda answer: -answer.value)[: self._params.count]

    def _step(
        self, group: _Group, found: Sequence[SampledToken], taken: Counter[int]
    ) -> list[tuple[int, int]]:
        candidates = self._candidates(group, found, taken)
        going: list[tuple[int, Path]] = []
        for place, (row, path) in enumerate(candidates):
            reason = self._reason(path)
            if reason is None and len(going) < group.size:
                going.append((row, path))
            elif reason is not None and place < group.size:
                value = path.score / path.length**self._params.length_penalty
                group.whole.append(Whole(path, value, reason))
        group.whole.sort(key=lambda answer: -answer.value)
        del group.whole[group.size :]
        if self._is_over(group, [path for _, path in going]):
            going = []
        group.running = [path for _, path in going]
        return [(row, path.token_id) for row, path in going]

    def _candidates(
        self, group: _Group, found: Sequence[SampledToken], taken: Counter[int]
    ) -> list[tuple[int, Path]]:
        """The best ways to go on, best first, and the row that each comes from."""
        penalty = self._params.diversity_penalty
        made = [
            (path.score + logprob - penalty * taken[token], path, row, token, logprob)
            for row, path in zip(group.rows, group.running, strict=True)
            for token, logprob in found[row].top
        ]
        made.sort(key=lambda way: -way[0])
        return [
            (row, Path(path, token, logprob, found[row].top, score, path.length + 1))
            for score, path, row, token, logprob in made[: self._kept]
        ]

    def _reason(self, path: Path) -> FinishReason | None:
        if path.token_id in self._ends or self._stops(path):
            return FinishReason.STOP
        return FinishReason.LENGTH if path.length >= self._limit else None

    def _is_over(self, group: _Group, going: list[Path]) -> bool:
        early, penalty = self._params.early_stopping, self._params.length_penalty
        full = len(group.whole) == group.size
        if not going or (full and early is True):
            return True
        length = self._limit if early == "never" and penalty > 0 else going[0].length
        worst = group.whole[-1].value if full else -math.inf
        best: float = going[0].score / length**penalty
        return best <= worst

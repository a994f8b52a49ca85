"""Lookahead decoding: the target guesses ahead of itself in spare rows, and remembers what it said.

Owns each sequence's window and pool of n-grams (arXiv 2402.02057). Knows nothing of models: it
learns from what the target chose behind each token of a draft, right or wrong.

The window is `window` columns of up to `ngram` - 1 levels. Level 0 is a chain of guesses behind the
last known token, and behind each of them hang the levels of its column: column w's token of level j
stands w + j + 1 behind the last known one. What the target chooses behind the lowest level is the
next level (a step of Jacobi's iteration), and when there are `ngram` - 1 of them, the top one goes:
with what was chosen, its column is an n-gram for the pool. Beside the window hang those n-grams of
the pool that begin with the last known token: mostly it is these that turn out right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from mmserve.spec.branches import ROOT, Branches
from mmserve.spec.draft import MOST_TOKENS, Draft
from mmserve.spec.drafter import Context, Landed, Wanted

POOL = 4096  # first tokens whose n-grams are remembered, by sequence


@dataclass
class _Ahead:
    """Of one sequence. `levels`: each with a token for every column; `pool`: what followed a token,
    the newest last, in the order in which they were last added to."""

    random: Random
    known: int  # tokens behind which its first column stands
    levels: list[list[int]] = field(default_factory=list)
    pool: dict[int, dict[tuple[int, ...], None]] = field(default_factory=dict)


class LookaheadDrafter:
    """`guesses`: n-grams of the pool that are tried in a step."""

    name = "lookahead"
    taps: tuple[int, ...] = ()

    def __init__(self, window: int = 8, ngram: int = 5, guesses: int = 7) -> None:
        assert window > 0 and ngram > 1 and guesses > 0, "a window looks at something"
        assert (window + guesses) * (ngram - 1) <= MOST_TOKENS, "more than a draft holds"
        self._window = window
        self._ngram = ngram
        self._guesses = guesses
        self._ahead: dict[str, _Ahead] = {}

    @property
    def length(self) -> int:
        """Of a whole draft: where it is cut, its window learns less, or nothing."""
        return self._window + self._ngram - 2

    def propose(self, wanted: Sequence[Wanted]) -> list[Draft | None]:
        return [self._tree(context, length) for context, length in wanted]

    def landed(self, context: Context, landed: Landed) -> None:
        ahead = self._ahead.get(context.id)
        if ahead is None or not landed.chosen:
            return
        if landed.draft is not None:
            self._deepen(ahead, landed.draft, landed.chosen)
        if len(ahead.levels) == self._ngram:
            del ahead.levels[0]  # the next one stands a place further on
            ahead.known += 1
            self._learn(ahead, context, ahead.known)
        self._follow(ahead, context)

    def end(self, context: Context) -> None:
        self._ahead.pop(context.id, None)

    def _tree(self, context: Context, length: int) -> Draft | None:
        if not context.token_ids:
            return None
        ahead = self._ahead.get(context.id)
        if ahead is None:
            known = len(context.token_ids)
            ahead = self._ahead[context.id] = _Ahead(Random(known), known)
            ahead.levels.append(_any(ahead, context, self._window))
        self._follow(ahead, context)
        branches = Branches()
        for following in ahead.pool.get(context.token_ids[-1], ()):
            parent = ROOT
            for token in following:
                parent = _hung(branches, parent, token)
        top = ROOT
        for column in zip(*ahead.levels, strict=True):
            parent = top = _hung(branches, top, column[0])
            for token in column[1:]:
                parent = _hung(branches, parent, token)
        draft = branches.draft()
        return draft.shortened(length) if draft else None

    def _deepen(self, ahead: _Ahead, draft: Draft, chosen: Sequence[int]) -> None:
        """Add the level that the target chose, if the draft shows anything of the window.

        A draft may have been cut, or be another drafter's: what counts is which tokens are in it.
        """
        lowest = list(self._lowest(ahead, draft))
        if lowest[0] is None:
            return
        # A column that was cut off gets some token of another's: any is as good.
        level = [chosen[(lowest[0] if n is None else n) + 1] for n in lowest]
        if len(ahead.levels) == self._ngram - 1:
            for n, column in zip(lowest, zip(*ahead.levels, level, strict=True), strict=True):
                if n is not None:
                    self._remember(ahead, column)
        ahead.levels.append(level)

    def _lowest(self, ahead: _Ahead, draft: Draft) -> Iterator[int | None]:
        """By column, the number of its lowest token in the draft."""
        numbers = {at: i for i, at in enumerate(zip(draft.parents, draft.tokens, strict=True))}
        top: int | None = ROOT
        for column in zip(*ahead.levels, strict=True):
            top = None if top is None else numbers.get((top, column[0]))
            number = top
            for token in column[1:]:
                number = None if number is None else numbers.get((number, token))
            yield number

    def _follow(self, ahead: _Ahead, context: Context) -> None:
        """Each column stands for a place in the text: those that are known now go."""
        known = _known(context)
        for end in range(ahead.known + 1, known + 1):
            self._learn(ahead, context, end)
        places = min(known - ahead.known, self._window)
        ahead.known = known
        for level in ahead.levels if places > 0 else ():
            level[:] = level[places:] + _any(ahead, context, places)

    def _learn(self, ahead: _Ahead, context: Context, end: int) -> None:
        """The n-gram that the text itself has there."""
        if end >= self._ngram:
            self._remember(ahead, tuple(context.token_ids[end - self._ngram : end]))

    def _remember(self, ahead: _Ahead, gram: tuple[int, ...]) -> None:
        first, following = gram[0], gram[1:]
        known = ahead.pool.pop(first, {})
        known.pop(following, None)
        known[following] = None
        if len(known) > self._guesses:
            del known[next(iter(known))]
        ahead.pool[first] = known
        if len(ahead.pool) > POOL:
            del ahead.pool[next(iter(ahead.pool))]


def _hung(branches: Branches, parent: int, token: int) -> int:
    number = branches.add(parent, token)
    assert number is not None, "a window and its guesses fit a draft"
    return number


def _any(ahead: _Ahead, context: Context, count: int) -> list[int]:
    """Guesses where there is nothing to go by: some tokens of the text."""
    places = ahead.random.choices(range(_known(context)), k=count)
    return [context.token_ids[place] for place in places]


def _known(context: Context) -> int:
    """How many tokens are known."""
    tokens, count = context.token_ids, len(context.token_ids)
    return count - 1 if tokens[-1] < 0 else count

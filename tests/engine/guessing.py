"""A drafter that knows the answers, as far as a test lets it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from mmserve.spec.draft import MOST_TOKENS, Draft
from mmserve.spec.drafter import Context, Landed, Wanted


class Guesser:
    """`answers`: tokens by request; each guess is right with probability `skill`. `branches`: how
    many other guesses stand beside each of a tree's."""

    name, taps = "guesser", ()

    def __init__(
        self, answers: Mapping[str, Sequence[int]], skill: float, seed: int, branches: int = 0
    ) -> None:
        self.answers, self.skill, self.branches = answers, skill, branches
        self.random = random.Random(seed)
        self.told: dict[str, list[int]] = {}  # what came since the last cut, by request
        self.said: dict[str, int] = {}  # tokens, with those before
        self.live: set[str] = set()
        self.right = self.shortest = 0

    def propose(self, wanted: Sequence[Wanted]) -> list[Draft | None]:
        return [self._guess(*each) for each in wanted]

    def _guess(self, context: Context, length: int) -> Draft | None:
        self.live.add(context.id)
        said = self.said.get(context.id, 0)
        rest = list(
            self.answers[context.id][
                said : said + self.random.randint(min(self.shortest, length), length)
            ]
        )
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for token in rest:
            wrong = self.random.sample([t for t in range(3, 259) if t != token], self.branches + 1)
            if self.random.random() < self.skill:
                wrong[self.random.randint(0, self.branches)] = token
            if len(tokens) + len(wrong) > MOST_TOKENS:
                break
            first = len(tokens)
            tokens += wrong
            parents += [parent] * len(wrong)
            parent = first + (wrong.index(token) if token in wrong else 0)
        return Draft(tuple(tokens), tuple(parents)) if tokens else None

    def landed(self, context: Context, landed: Landed) -> None:
        self.live.add(context.id)
        if not landed.chosen:
            assert landed.draft is None and not landed.path
            return
        assert len(landed.chosen) == 1 + (len(landed.draft) if landed.draft else 0)
        at = (-1, *landed.path)
        self.told.setdefault(context.id, []).extend(landed.chosen[1 + n] for n in at)
        self.said[context.id] = self.said.get(context.id, 0) + len(at)
        self.right += len(landed.path)
        said = list(context.token_ids[context.num_prompt_tokens :])
        assert self.told[context.id][: len(said)] == said

    def end(self, context: Context) -> None:
        self.live.discard(context.id)
        self.told.pop(context.id, None)

"""Sampled tokens have the target's distribution, whoever drafts: 20,000 draws of a small one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from mmserve.engine.sampler import Sampler, SamplingState
from mmserve.request import SamplingParams
from mmserve.spec.draft import Draft
from mmserve.spec.drafter import Context, Drafter, Landed, Wanted
from mmserve.spec.lookahead import LookaheadDrafter
from mmserve.spec.ngram import NgramDrafter
from mmserve.spec.suffix import SuffixDrafter
from mmserve.spec.verify import accepted
from tests.engine.test_sampler import plain_kept, plain_penalties

VOCAB, SEQUENCES, DRAWS, PROMPT = 6, 50, 20_000, [0, 3]
# What comes next hangs on the last token alone, so 20,000 draws are many of each kind.
LOGITS = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5
PARAMS = {
    "temperature": SamplingParams(temperature=0.8),
    "top-k": SamplingParams(temperature=1.3, top_k=3),
    "top-p": SamplingParams(top_p=0.7),
    "penalties": SamplingParams(
        repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.02
    ),
}
SEEDED = {"top-k", "penalties"}  # whose sequences have a seed each; the others share one


class Anything:
    """Trees of tokens at random, which no text has led to."""

    name, taps = "anything", ()

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(0)

    def propose(self, wanted: Sequence[Wanted]) -> list[Draft | None]:
        tokens = torch.randperm(VOCAB, generator=self.random).tolist()
        return [Draft(tuple(tokens[:3] * 2), (-1, -1, -1, 0, 0, 1)) for _ in wanted]

    def landed(self, context: Context, landed: Landed) -> None:
        pass

    def end(self, context: Context) -> None:
        pass


MADE: dict[str, Callable[[], Drafter]] = {
    "ngram": lambda: NgramDrafter(1, 3),
    "suffix": lambda: SuffixDrafter(1 << 20, width=3),
    "lookahead": lambda: LookaheadDrafter(3, 3, 2),
    "anything": Anything,
}


class Chats:
    """Sequences that are drafted for and checked together, as the engine does it."""

    def __init__(self, drafter: Drafter, params: SamplingParams, seeded: bool) -> None:
        self.drafter = drafter
        self.sampler = Sampler(torch.Generator().manual_seed(1))
        self.texts = [list(PROMPT) for _ in range(SEQUENCES)]
        self.contexts = [Context(str(i), t, len(PROMPT)) for i, t in enumerate(self.texts)]
        self.states = [
            SamplingState(replace(params, seed=i if seeded else None), text, len(PROMPT))
            for i, text in enumerate(self.texts)
        ]
        self.right = self.wrong = 0

    def step(self) -> None:
        wanted = [Wanted(context, 5) for context in self.contexts]
        drafts = [d.read() if d is not None else None for d in self.drafter.propose(wanted)]
        states: list[SamplingState] = []
        last: list[int] = []
        for text, state, draft in zip(self.texts, self.states, drafts, strict=True):
            paths = draft.paths if draft else ()
            states += [state, *(state.behind(path, None) for path in paths)]
            last += [text[-1], *(path[-1] for path in paths)]
        tokens = [t.token_id for t in self.sampler.begin(LOGITS[last], states).land()]
        for i, draft in enumerate(drafts):
            rows = 1 + (len(draft) if draft else 0)
            chosen, tokens = tokens[:rows], tokens[rows:]
            path = accepted(draft, chosen) if draft else ()
            self.texts[i] += [chosen[1 + number] for number in (-1, *path)]
            self.states[i].spend(1 + len(path))
            self.right += len(path)
            self.wrong += draft is not None and not path
            self.drafter.landed(self.contexts[i], Landed(draft, tuple(chosen), path))


def odds(text: list[int], params: SamplingParams) -> list[float]:
    """Of each token behind `text`, as the rules say it."""
    row = plain_penalties(LOGITS[text[-1]].tolist(), params, PROMPT, text[len(PROMPT) :])
    scaled = [value / params.temperature for value in row]
    kept = plain_kept(scaled, params)
    weights = [math.exp(v) if t in kept else 0.0 for t, v in enumerate(scaled)]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("rule", PARAMS)
def test_twenty_thousand_draws_have_the_targets_odds(name: str, rule: str) -> None:
    params = PARAMS[rule]
    chats = Chats(MADE[name](), params, seeded=rule in SEEDED)
    each = DRAWS // SEQUENCES
    while min(map(len, chats.texts)) < each + len(PROMPT):
        chats.step()
    assert chats.right > 500 and chats.wrong > 500
    seen: dict[tuple[int, int], int] = defaultdict(int)  # by the token before, and the token
    expected: dict[tuple[int, int], float] = defaultdict(float)
    known: dict[int, list[float]] = {}
    for text in chats.texts:
        for end in range(len(PROMPT), len(PROMPT) + each):
            before = text[end - 1]
            if rule == "penalties" or before not in known:
                known[before] = odds(text[:end], params)
            for token, part in enumerate(known[before]):
                expected[before, token] += part
            seen[before, text[end]] += 1
    assert all(expected[pair] > 0 for pair in seen)
    tested = [pair for pair, count in expected.items() if count >= 5]
    chi2 = sum((seen[pair] - expected[pair]) ** 2 / expected[pair] for pair in tested)
    freedom = len(tested) - len({before for before, _ in tested})
    p = torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(chi2 / 2))
    assert freedom >= VOCAB and p > 0.01

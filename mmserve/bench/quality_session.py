"""What one engine answers, for comparing KV formats: likelihoods, easy-VQA, capacity, speed.

Owns the prompts and how they are asked. Knows nothing of which formats are compared, or how.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mmserve.bench.ceilings import synchronize
from mmserve.bench.chat import asked, chat
from mmserve.bench.drafts import LOOKS, QUESTIONS
from mmserve.bench.pictures import draw
from mmserve.engine.engine import Engine
from mmserve.prompt import Message, TextPart
from mmserve.request import Request, SamplingParams, Segment, TextSegment

BEST = 20  # tokens of a place whose log-probabilities are compared
AT_ONCE = 64  # requests
PICTURES = 4
GIB = 1024**3

Segments = tuple[Segment, ...]


class Said(NamedTuple):
    """An answer, and at every place the log-probabilities of the best tokens."""

    tokens: tuple[int, ...]
    best: tuple[dict[int, float], ...]


class Question(NamedTuple):
    image: Path
    text: str
    answer: str


class Session:
    def __init__(self, engine: Engine, tokens: int) -> None:
        """`tokens`: of an answer."""
        self.engine, self._tokens = engine, tokens
        self._count = itertools.count()

    def prompts(self) -> dict[str, list[Segments]]:
        """By kind."""
        found = {"text": [self._chat([asked(q)]) for q in QUESTIONS]}
        if self.engine.least_image_tokens:
            shown = [draw(f"quality {n}") for n in range(PICTURES)]
            found["image"] = [self._chat([asked(text, p)]) for p in shown for text in LOOKS]
            found["turns"] = [
                self._chat(
                    [
                        asked(LOOKS[0], shown[n]),
                        Message("assistant", (TextPart("It shows several shapes."),)),
                        asked("And this one?", shown[n - 1]),
                        Message("assistant", (TextPart("Other shapes, in other colours."),)),
                        asked("What differs between the two images?"),
                    ]
                )
                for n in range(PICTURES)
            ]
        return found

    def answers(self, prompts: Sequence[Segments]) -> list[Said]:
        params = SamplingParams(
            max_tokens=self._tokens, temperature=0.0, logprobs=BEST, ignore_eos=True
        )
        return self._run(prompts, params)

    def behind(self, prompt: Segments, answer: Sequence[int]) -> list[dict[int, float]]:
        """What this engine would say at each place of an answer that another one gave."""
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=BEST, ignore_eos=True)
        begun = [
            (*prompt, TextSegment(tuple(answer[:end]))) if end else prompt
            for end in range(len(answer))
        ]
        return [said.best[0] for said in self._run(begun, params)]

    def share_right(self, questions: Sequence[Question]) -> float:
        """Of easy-VQA's questions: exact answers, case and a final full stop ignored."""
        params = SamplingParams(max_tokens=8, temperature=0.0)
        right = 0
        for first in range(0, len(questions), AT_ONCE):
            some = questions[first : first + AT_ONCE]
            looks = [[asked(q.text, q.image.read_bytes())] for q in some]
            said = self._run([self._chat(look) for look in looks], params)
            for question, answer in zip(some, said, strict=True):
                words = self.engine.tokenizer.decode(list(answer.tokens))
                right += words.strip().lower().rstrip(".") == question.answer
        return right / len(questions)

    def text_tokens_per_gib(self) -> float:
        shapes = [pool.shape for pool in self.engine.runner.text]
        return GIB / sum(shape.page_bytes / shape.page_size for shape in shapes)

    def image_bytes(self) -> int:
        """Of the smallest image that the model takes, whole pages; 0 without images."""
        tokens = self.engine.least_image_tokens
        shapes = [pool.shape for pool in self.engine.runner.vision]
        return sum(-(-tokens // shape.page_size) * shape.page_bytes for shape in shapes)

    def tokens_per_s(self, prompts: Sequence[Segments]) -> float:
        """Decoding all of these at once, behind the last one's first token."""
        params = SamplingParams(max_tokens=self._tokens, temperature=0.0, ignore_eos=True)
        for _ in range(2):  # what is compiled or captured at its first use is not what is measured
            begun, made, ended = self._timed(prompts, params)
        return made / (ended - begun)

    def _timed(
        self, prompts: Sequence[Segments], params: SamplingParams
    ) -> tuple[float, int, float]:
        """When the last first token came, how many came behind it, and when it ended."""
        waiting = {self._add(prompt, params) for prompt in prompts}
        begun, made = time.perf_counter(), 0
        while self.engine.has_work:
            for name, event in self.engine.step():
                if waiting:
                    waiting -= {name} if event.token_ids else set()
                    begun = time.perf_counter()
                else:
                    made += len(event.token_ids)
        synchronize(self.engine.runner.device)
        return begun, made, time.perf_counter()

    def _run(self, prompts: Sequence[Segments], params: SamplingParams) -> list[Said]:
        found: list[Said] = []
        for first in range(0, len(prompts), AT_ONCE):
            names = [self._add(prompt, params) for prompt in prompts[first : first + AT_ONCE]]
            tokens: dict[str, list[int]] = {name: [] for name in names}
            best: dict[str, list[dict[int, float]]] = {name: [] for name in names}
            while self.engine.has_work:
                for name, event in self.engine.step():
                    tokens[name] += event.token_ids
                    best[name] += [
                        {token: value for token, _, value in one.top} for one in event.logprobs
                    ]
            found += [Said(tuple(tokens[name]), tuple(best[name])) for name in names]
        return found

    def _add(self, prompt: Segments, params: SamplingParams) -> str:
        request = Request(f"quality-{next(self._count)}", prompt, params)
        self.engine.add(request)
        return request.id

    def _chat(self, messages: list[Message]) -> Segments:
        return chat(self.engine, messages)


def divergence(own: dict[int, float], other: dict[int, float]) -> float:
    """Nats from `own` to `other`, over the tokens that are among both's best, and the rest as one.

    What lies outside of these is one event more, so the sum is a divergence and never below 0.
    """
    both = own.keys() & other.keys()
    total = sum(math.exp(own[t]) * (own[t] - other[t]) for t in both)
    rest, theirs = (max(1 - sum(math.exp(of[t]) for t in both), 1e-9) for of in (own, other))
    return max(total + rest * math.log(rest / theirs), 0.0)


def likelihood(best: dict[int, float], token: int) -> float:
    """A token's log-probability; that of the least of the best ones where it is none of them."""
    return best.get(token, min(best.values()))

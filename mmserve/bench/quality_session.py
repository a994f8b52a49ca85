"""What one engine answers, for comparing KV formats: likelihoods, easy-VQA, capacity, speed.

Owns the prompts and how they are asked. Knows nothing of which formats are compared, or how.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from mmserve.bench.ceilings import synchronize
from mmserve.bench.chat import asked, chat
from mmserve.bench.drafts import LOOKS, QUESTIONS
from mmserve.bench.load import Load, Window
from mmserve.bench.pictures import draw
from mmserve.engine.engine import Engine
from mmserve.prompt import Message, TextPart
from mmserve.request import Request, SamplingParams, Segment, TextSegment

BEST = 20  # tokens of a place whose log-probabilities are compared
AT_ONCE = 64  # requests; as one ends, the next one begins
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


@dataclass(frozen=True)
class Steps:
    """Whole decode steps to be timed: `batch` sequences of `context` random text tokens, each
    behind as many `images` of its own."""

    batch: int = 64
    context: int = 4096
    images: int = 1
    prefill: int = 8192  # text tokens in one step, before: those that have begun grow meanwhile
    window: Window = field(default_factory=lambda: Window(max_steps=100))

    @property
    def grown(self) -> int:
        """Tokens a sequence grows by until the last step that is timed."""
        before = 2 * -(-self.batch * self.context // self.prefill)
        return before + self.window.warm_up + self.window.max_steps + 2

    def text_tokens(self, page_size: int) -> int:
        """As the pool must hold them."""
        return self.batch * (self.context + self.grown + page_size)


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
        looks = ([asked(q.text, q.image.read_bytes())] for q in questions)
        said = self._run(map(self._chat, looks), params)
        words = (self.engine.tokenizer.decode(list(answer.tokens)) for answer in said)
        found = (text.strip().lower().rstrip(".") for text in words)
        answers = (question.answer for question in questions)
        return sum(a == b for a, b in zip(found, answers, strict=True)) / len(questions)

    def text_tokens_per_gib(self) -> float:
        shapes = [pool.shape for pool in self.engine.runner.text]
        return GIB / sum(shape.page_bytes / shape.page_size for shape in shapes)

    def residual_bytes(self) -> int:
        """Of the pools in which text waits for its pages to be full."""
        pools = [pool.residual for pool in self.engine.runner.text if pool.residual is not None]
        return sum(pool.tensor.nbytes for pool in pools)

    def image_bytes(self) -> int:
        """Of an image that nothing is said of, the smallest that the model takes, whole pages; 0
        without images."""
        least = self.engine.least_image_tokens
        tokens = self.engine.border.image_details.get("auto", least)
        shapes = [pool.shape for pool in self.engine.runner.vision]
        return sum(-(-tokens // shape.page_size) * shape.page_bytes for shape in shapes)

    def tokens_per_s(self, prompts: Sequence[Segments]) -> float:
        """Decoding all of these at once, behind the last one's first token."""
        params = SamplingParams(max_tokens=self._tokens, temperature=0.0, ignore_eos=True)
        for _ in range(2):  # what is compiled or captured at its first use is not what is measured
            begun, made, ended = self._timed(prompts, params)
        return made / (ended - begun)

    def step_ms(self, steps: Steps) -> float:
        """Of one decode step as a whole. Raises ValueError where they do not fit together."""
        load = Load(self.engine)
        images = steps.images if self.engine.least_image_tokens else 0
        prompts = [[*load.images(images), load.text(steps.context)] for _ in range(steps.batch)]
        load.clear()
        load.start_decoding(prompts, steps.grown)
        seconds, count, _ = load.time_steps(steps.window)
        load.clear()
        return 1e3 * seconds / count

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

    def _run(self, prompts: Iterable[Segments], params: SamplingParams) -> list[Said]:
        """Their answers, in their order. A prompt is made when there is a place for it."""
        waiting, running = iter(prompts), 0
        tokens: dict[str, list[int]] = {}
        best: dict[str, list[dict[int, float]]] = {}
        while True:
            for prompt in itertools.islice(waiting, AT_ONCE - running):
                name = self._add(prompt, params)
                tokens[name], best[name], running = [], [], running + 1
            if not running:
                return [Said(tuple(tokens[name]), tuple(best[name])) for name in tokens]
            for name, event in self.engine.step():
                tokens[name] += event.token_ids
                best[name] += [
                    {token: value for token, _, value in one.top} for one in event.logprobs
                ]
                running -= event.finish_reason is not None

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

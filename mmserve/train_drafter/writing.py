"""The texts that a drafter is trained on, written by the model itself through the engine.

Owns what is asked in which order, and `Chat`. No outside data: a question is the model's own (it is
given the conversation up to the user's turn, and writes that turn, too), one of `questions`, or one
about a drawn picture. Knows nothing of training.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from mmserve.engine.engine import Engine
from mmserve.prompt import ImagePart, Message, Part, TextPart, TokensPart
from mmserve.request import (
    FinishReason,
    ImageInput,
    ImageSegment,
    Request,
    SamplingParams,
    Segment,
    TextSegment,
)
from mmserve.train_drafter import questions
from mmserve.train_drafter.pictures import PICTURES, picture

LONGEST_QUESTION = 64  # tokens
SHARES = {"own": 0.4, "asked": 0.3, "image": 0.3}  # of the chats, by where questions come from
GREEDY_SHARE = 0.6  # of the answers; the rest are sampled
SECOND_TURN_SHARE = 0.3


@dataclass(frozen=True)
class Chat:
    """`pieces` of the prompt: text tokens, or the number of a picture; `answer`: tokens, with the
    one that ended it."""

    kind: Literal["text", "image"]
    pieces: tuple[tuple[int, ...] | int, ...]
    answer: tuple[int, ...]

    def as_json(self) -> str:
        return json.dumps([self.kind, self.pieces, self.answer])

    @classmethod
    def from_json(cls, line: str) -> Chat:
        kind, pieces, answer = json.loads(line)
        return cls(
            kind, tuple(p if isinstance(p, int) else tuple(p) for p in pieces), tuple(answer)
        )


class _Turn(NamedTuple):
    """What is being written. `messages`: what stands before it; None: the question itself is."""

    messages: tuple[Message, ...] | None
    segments: tuple[Segment, ...]
    number: int | None  # of the picture
    turns: int  # answers so far


class Writer:
    """Keeps an engine busy with chats."""

    def __init__(self, engine: Engine, seed: int, longest: int, images: bool) -> None:
        """`longest`: tokens of an answer."""
        self._engine, self._random, self._longest = engine, random.Random(seed), longest
        self._shares = {k: v for k, v in SHARES.items() if images or k != "image"}
        self._turns: dict[str, _Turn] = {}
        self._tokens: dict[str, list[int]] = {}
        self._asked: set[str] = set()
        self._answered: set[str] = set()
        self._ready: list[str] = []  # the model's own questions, not yet answered
        self._count = 0
        self._opening = self._before_question()
        self._look = lru_cache(PICTURES)(self._prepare)

    def write(self, num_tokens: int, deadline: float) -> Iterator[Chat]:
        """Chats until so many tokens of answers, or `time.monotonic` reaches `deadline`; those that
        are not finished then are dropped."""
        slots, written = self._engine.scheduler.config.max_num_seqs, 0
        while written < num_tokens and time.monotonic() < deadline:
            while len(self._turns) < slots:
                self._begin()
            for request_id, event in self._engine.step():
                self._tokens[request_id] += event.token_ids
                if event.finish_reason is not None:
                    chat = self._finish(request_id, event.finish_reason)
                    if chat is not None:
                        written += len(chat.answer)
                        yield chat
        self._engine.abort_all(FinishReason.ABORT)
        self._engine.step()

    def _begin(self) -> None:
        draw = self._random
        kind = draw.choices(list(self._shares), list(self._shares.values()))[0]
        if kind == "image":
            number = draw.randrange(PICTURES)
            shown = ImagePart(b"")
            asked: tuple[Part, ...] = (shown, TextPart(questions.about_picture(draw)))
            self._ask((Message("user", asked),), number, 0)
        elif kind == "own" and not self._ready:
            params = SamplingParams(
                max_tokens=LONGEST_QUESTION, temperature=1.0, top_p=0.95, seed=draw.getrandbits(31)
            )
            self._submit(_Turn(None, self._opening, None, 0), params)
        else:
            text = self._ready.pop() if kind == "own" else questions.about_text(draw)
            self._ask((Message("user", (TextPart(text),)),), None, 0)

    def _ask(self, messages: tuple[Message, ...], number: int | None, turns: int) -> None:
        images = [] if number is None else [self._look(number)]
        segments = self._engine.template.render(messages, images).segments
        greedy = self._random.random() < GREEDY_SHARE
        if greedy and number is None and turns == 0:  # a second time it would say the same
            text = str(messages)
            greedy = text not in self._answered
            self._answered.add(text)
        params = SamplingParams(
            max_tokens=self._longest,
            temperature=0.0 if greedy else self._random.uniform(0.5, 1.0),
            seed=self._random.getrandbits(31),
        )
        self._submit(_Turn(messages, segments, number, turns), params)

    def _submit(self, turn: _Turn, params: SamplingParams) -> None:
        self._count += 1
        name = str(self._count)
        self._turns[name], self._tokens[name] = turn, []
        self._engine.add(Request(name, turn.segments, params))

    def _finish(self, request_id: str, reason: FinishReason) -> Chat | None:
        turn, tokens = self._turns.pop(request_id), self._tokens.pop(request_id)
        if reason not in (FinishReason.STOP, FinishReason.LENGTH) or not tokens:
            return None
        if turn.messages is None:
            text = self._engine.tokenizer.decode(tokens).strip()
            if reason is FinishReason.STOP and text and text not in self._asked:
                self._asked.add(text)
                self._ready.append(text)
            return None
        if turn.turns == 0 and reason is FinishReason.STOP:
            if self._random.random() < SECOND_TURN_SHARE:
                said = Message("assistant", (TokensPart(tuple(tokens)),))
                asked = Message("user", (TextPart(questions.further(self._random)),))
                self._ask((*turn.messages, said, asked), turn.number, 1)
        pieces = (s.token_ids if isinstance(s, TextSegment) else turn.number for s in turn.segments)
        kind: Literal["text", "image"] = "text" if turn.number is None else "image"
        return Chat(kind, tuple(p for p in pieces if p is not None), tuple(tokens))

    def _before_question(self) -> tuple[Segment, ...]:
        """A conversation up to the user's first word: what two of them have in common."""
        rendered = [
            self._engine.template.render([Message("user", (TextPart(text),))], []).segments
            for text in ("0", "Zero")
        ]
        one, other = ([t for s in r for t in _ids(s)] for r in rendered)
        same = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        return (TextSegment(tuple(one[:same])),)

    def _prepare(self, number: int) -> ImageInput:
        return self._engine.pipeline.prepare(picture(number))


def _ids(segment: Segment) -> Sequence[int]:
    assert not isinstance(segment, ImageSegment)
    return segment.token_ids


def save(chats: Iterable[Chat], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(chat.as_json() + "\n" for chat in chats), "utf-8")


def read(file: Path) -> list[Chat]:
    """The whole lines of a file: its writer may have been stopped in the middle of one."""
    whole, _, _ = file.read_text("utf-8").rpartition("\n")
    return [Chat.from_json(line) for line in whole.splitlines()]

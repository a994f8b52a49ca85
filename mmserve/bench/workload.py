"""What is asked of the engine: sessions of turns, in phases, made from a seed.

Owns the workloads' shapes and texts. Knows nothing of engines, clocks or models.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmserve.bench.pictures import draw
from mmserve.prompt import ImagePart, Message, Part, TextPart, TokensPart

# Each is one token of the default model, so that a number of words is a number of tokens.
_WORDS = (
    "the a of and to in for on with about from picture colour shape light river house tree small "
    "large red green blue yellow water road city people time day night summer winter music story "
    "book paper table window door garden school street market morning"
).split()


@dataclass(frozen=True)
class Turn:
    """What a user sends: a text and new images; `text_first` puts the text before the images."""

    text: str
    images: tuple[bytes, ...] = ()
    text_first: bool = False


@dataclass(frozen=True)
class Session:
    """One user's turns in order. Only the newest `view` images of the conversation are sent."""

    turns: tuple[Turn, ...]
    view: int

    def messages(self, turn: int, answers: Sequence[tuple[int, ...]]) -> tuple[Message, ...]:
        """What a client sends at a turn; answers[i] are the tokens of the answer to turn i."""
        so_far = self.turns[: turn + 1]
        old = sum(len(t.images) for t in so_far) - self.view
        out: list[Message] = []
        for i, said in enumerate(so_far):
            images = [ImagePart(data) for data in said.images[max(old, 0) :]]
            old -= len(said.images)
            text = TextPart(said.text)
            parts: list[Part] = [text, *images] if said.text_first else [*images, text]
            out.append(Message("user", tuple(parts)))
            if i < turn:
                out.append(Message("assistant", (TokensPart(answers[i]),)))
        return tuple(out)


@dataclass(frozen=True)
class Phase:
    """Sessions that run side by side, or one after another where not `concurrent`."""

    name: str
    sessions: tuple[Session, ...]
    concurrent: bool = True


@dataclass(frozen=True)
class Shape:
    """How large a workload is. `images` are those in view; token counts are a turn's."""

    sessions: int
    turns: int
    images: int
    prompt_tokens: int
    output_tokens: int


class _Maker:
    """Texts and pictures of one workload, all different, the same for the same seed."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self._seed = seed
        self._rng = random.Random(seed)
        self._drawn = 0

    def text(self) -> str:
        return " ".join(self._rng.choices(_WORDS, k=self.shape.prompt_tokens))

    def pictures(self, count: int) -> tuple[bytes, ...]:
        self._drawn += count
        return tuple(draw(f"{self._seed}/{self._drawn - i}") for i in range(count))

    def session(self, images: tuple[bytes, ...], *, turns: int = 1, slide: bool = False) -> Session:
        """A session that opens with `images`; with `slide`, each later turn brings a new one."""
        later = [self.pictures(1) if slide else () for _ in range(turns - 1)]
        said = tuple(Turn(self.text(), new) for new in (images, *later))
        return Session(said, self.shape.images)

    def fresh(self, **how: Any) -> tuple[Session, ...]:
        """All sessions, each with images of its own."""
        return self.sharing(lambda _: self.pictures(self.shape.images), **how)

    def sharing(
        self, images: Callable[[int], tuple[bytes, ...]], **how: Any
    ) -> tuple[Session, ...]:
        """All sessions, the i-th opening with images(i)."""
        return tuple(self.session(images(i), **how) for i in range(self.shape.sessions))


def _separate(maker: _Maker) -> tuple[Phase, ...]:
    return (Phase("load", maker.fresh(turns=maker.shape.turns)),)


def _sliding(maker: _Maker) -> tuple[Phase, ...]:
    return (Phase("load", maker.fresh(turns=maker.shape.turns, slide=True)),)


def _same_image(maker: _Maker) -> tuple[Phase, ...]:
    """Images nobody has sent; one of them again, one session at a time; then all at once."""
    cold = maker.fresh()
    known = cold[-1].turns[0].images
    return (
        Phase("cold", cold, concurrent=False),
        Phase("warm", maker.sharing(lambda _: known), concurrent=False),
        Phase("load", maker.sharing(lambda _: known, turns=maker.shape.turns)),
    )


def _cached_images(maker: _Maker) -> tuple[Phase, ...]:
    """New text before images: never seen, then known in other orders, so that no prefix helps."""
    cold = maker.fresh()
    known = cold[-1].turns[0].images
    warm = maker.sharing(lambda i: known[i % len(known) :] + known[: i % len(known)])
    return tuple(
        Phase(name, tuple(_text_first(s) for s in sessions), concurrent=False)
        for name, sessions in (("cold", cold), ("warm", warm))
    )


def _text_first(session: Session) -> Session:
    turns = tuple(replace(turn, text_first=True) for turn in session.turns)
    return replace(session, turns=turns)


@dataclass(frozen=True)
class _Kind:
    make: Callable[[_Maker], tuple[Phase, ...]]
    default: Shape


WORKLOADS = {
    "text": _Kind(_separate, Shape(8, 2, 0, 64, 64)),
    "one-image": _Kind(_separate, Shape(8, 2, 1, 16, 32)),
    "same-image-many-sessions": _Kind(_same_image, Shape(16, 1, 4, 16, 32)),
    "cached-images": _Kind(_cached_images, Shape(16, 1, 5, 16, 8)),
    "sliding-images": _Kind(_sliding, Shape(30, 8, 5, 16, 16)),
}


def build(name: str, shape: Shape, seed: int) -> tuple[Phase, ...]:
    """The phases of a workload, in the order to run them.

    Raises ValueError where a workload about images has none, or `text` has some.
    """
    if (name == "text") == (shape.images > 0):
        raise ValueError(f"workload {name} cannot have {shape.images} images in view")
    return WORKLOADS[name].make(_Maker(shape, seed))

"""Examples as the model reads them: the served chat template's tokens, and which are learned.

Owns where answers stand and how what is read from a picture is spelled. The template is the
server's own, so that a model is trained on what it will be shown. Knows nothing of batches.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from mmserve.prompt import ChatTemplate, ImagePart, Message, Part, TextPart, TokensPart
from mmserve.request import ImageInput, TextSegment
from mmserve.tokenizer import Tokenizer
from mmserve.vision.crops import Crops
from mmserve.vision.preprocess import Pixels, to_pieces
from mmserve.vision.train.example import Example, Turn

OTHER_SYSTEM = 0.25  # of the dialogues begin with one of these in place of the model's own
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly assistant that can see images.",
    "You answer questions about pictures.",
    "You are a careful assistant. Be concise.",
    "Answer briefly.",
)

Numbers = npt.NDArray[np.int32]


class Spoken(Protocol):
    """What of a model's description is needed."""

    @property
    def system_prompt(self) -> str: ...
    @property
    def image_prefix(self) -> str: ...
    @property
    def image_suffix(self) -> str: ...
    @property
    def image_size(self) -> int: ...


@dataclass(frozen=True)
class Dialogue:
    """`tokens` [n], 0 in images; `image_of` [n]: 0 for text, else its image's first piece by its
    number from 1; `answers` [n] bool: what the model is to say. `pixels`: of each piece, of which
    an image that is seen as a whole has one."""

    skill: str
    tokens: Numbers
    image_of: Numbers
    answers: npt.NDArray[np.bool_]
    pixels: tuple[Pixels, ...]


class Scribe:
    """Writes examples down."""

    def __init__(self, tokenizer: Tokenizer, spoken: Spoken) -> None:
        self._tokenizer, self._size = tokenizer, spoken.image_size
        self._template = ChatTemplate(
            tokenizer,
            system=spoken.system_prompt,
            image_prefix=spoken.image_prefix,
            image_suffix=spoken.image_suffix,
        )

    def write(
        self,
        example: Example,
        latents: int,
        rng: random.Random,
        *,
        crops: Crops | None = None,
        scored: bool = False,
    ) -> Dialogue:
        """`latents`: of each piece of an image; `crops`: how large images are cut up, which needs
        all latents. `scored`: only the last answer counts."""
        messages = self._messages(example)
        if rng.random() < OTHER_SYSTEM and not scored:
            messages.insert(0, Message("system", (TextPart(rng.choice(SYSTEMS)),)))
        pieces = [self._pieces(image, crops) for image in example.images]
        shown = [ImageInput(b"", b"", latents * len(piece)) for piece in pieces]
        tokens, image_of, answers = list[int](), list[int](), list[bool]()
        first, whole = 1, 0
        said = False  # by the model, all of which is but for what ends it
        for segment in self._template.render(messages, shown).segments:
            if not isinstance(segment, TextSegment):
                count = segment.image.num_tokens
                tokens += [0] * count
                image_of += [first] * count
                answers += [False] * count
                first += count // latents
                continue
            for token in segment.token_ids:
                last = -1 - token == len(example.turns) - 1
                ids = [token] if token >= 0 else self.spell(example.turns[-1 - token])
                counts = said if token >= 0 else last or not scored
                tokens += ids
                image_of += [0] * len(ids)
                answers += [counts] * len(ids)
                whole = len(tokens) if said else whole
                said = token < 0 and counts
        return Dialogue(
            example.skill,
            np.array(tokens[:whole], np.int32),
            np.array(image_of[:whole], np.int32),
            np.array(answers[:whole], np.bool_),
            tuple(piece for image in pieces for piece in image),
        )

    def _pieces(self, image: Image.Image, crops: Crops | None) -> Pixels:
        size = self._size
        count = crops.count(image.width, image.height, size, "auto") if crops else 0
        return to_pieces(image, size, count)

    def _messages(self, example: Example) -> list[Message]:
        messages = []
        for number, turn in enumerate(example.turns):
            images = (ImagePart(b"") for _ in turn.shows)
            asked: tuple[Part, ...] = (*images, TextPart(turn.question))
            # An answer goes by its number, which is no token's, until its place is known.
            said = TokensPart((-1 - number,))
            messages += [Message("user", asked), Message("assistant", (said,))]
        return messages

    def spell(self, turn: Turn) -> list[int]:
        """An answer's tokens: of its spelled parts, those of each character alone."""
        ids: list[int] = []
        at = 0
        for start, end in turn.spelled:
            ids += self._encode(turn.answer[at:start])
            for character in turn.answer[start:end]:
                ids += self._encode(character)
            at = end
        return ids + self._encode(turn.answer[at:])

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text) if text else []

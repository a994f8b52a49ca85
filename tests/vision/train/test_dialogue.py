"""Examples written down: exactly what the server's template says, and what of it is learned."""

from __future__ import annotations

import random

import numpy as np
import pytest
from PIL import Image

from mmserve.prompt import ChatTemplate, ImagePart, Message, Part, TextPart
from mmserve.request import ImageInput, TextSegment
from mmserve.tokenizer import Tokenizer
from mmserve.vision.crops import Crops
from mmserve.vision.train.dialogue import Dialogue, Scribe
from mmserve.vision.train.example import Example, Turn
from mmserve.vision.train.packing import Packer
from mmserve.vision.train.stage import Packing
from tests.engine.tiny import tiny_tokenizer
from tests.vision.train.tiny import SIZE, start

TOKENIZER = Tokenizer(tiny_tokenizer(), ["<|im_end|>"])
RED, BLUE = (Image.new("RGB", (50, 30), colour) for colour in ("red", "blue"))
EXAMPLE = Example(
    "any",
    (RED, BLUE),
    (
        Turn("What?", "Red.", shows=(0,)),
        Turn("And now?", "It says cat.", shows=(1,), spelled=((8, 11),)),
        Turn("And before?", "Red."),
    ),
)


def write(scored: bool = False, seed: int = 1) -> Dialogue:
    spec = start().loaded.spec
    return Scribe(TOKENIZER, spec).write(EXAMPLE, 4, random.Random(seed), scored=scored)


def text(tokens: np.ndarray) -> str:
    return TOKENIZER.decode(tokens.tolist(), skip_special=False)


def test_a_dialogue_is_what_the_server_would_show_of_it() -> None:
    spec, made = start().loaded.spec, write(scored=True)
    template = ChatTemplate(
        TOKENIZER,
        system=spec.system_prompt,
        image_prefix=spec.image_prefix,
        image_suffix=spec.image_suffix,
    )
    messages: list[Message] = []
    shown: list[ImageInput] = []
    for turn in EXAMPLE.turns:  # what is asked before each answer begins the dialogue
        parts: tuple[Part, ...] = (*(ImagePart(b"") for _ in turn.shows), TextPart(turn.question))
        messages.append(Message("user", parts))
        shown += [ImageInput(b"", b"", 4) for _ in turn.shows]
        segments = template.render(messages, shown).segments
        ids = [
            t for s in segments for t in (s.token_ids if isinstance(s, TextSegment) else (0,) * 4)
        ]
        assert made.tokens[: len(ids)].tolist() == ids
        messages.append(Message("assistant", (TextPart(turn.answer),)))
    assert made.tokens[-1] == TOKENIZER.special("<|im_end|>")


def test_answers_and_their_ends_are_learned_and_nothing_else() -> None:
    made = write()
    assert text(made.tokens[made.answers]) == "Red.<|im_end|>It says cat.<|im_end|>Red.<|im_end|>"
    assert not made.answers[made.image_of > 0].any()


def test_where_it_is_scored_the_last_answer_counts() -> None:
    made = write(scored=True)
    assert text(made.tokens[made.answers]) == "Red.<|im_end|>"
    assert made.answers[-len("Red.") - 1 :].all()


def test_images_stand_where_they_are_shown() -> None:
    made = write()
    assert [int((made.image_of == k).sum()) for k in (1, 2)] == [4, 4]
    assert (made.tokens[made.image_of > 0] == 0).all()
    first = int(np.argmax(made.image_of == 2))
    assert text(made.tokens[:first]).endswith("Image 2: ")
    assert [p.shape for p in made.pixels] == [(3, SIZE, SIZE)] * 2
    assert made.pixels[0][:, 0, 0].tolist() == [255, 0, 0]


def test_what_is_read_is_spelled_a_character_at_a_time(tokenizer: Tokenizer) -> None:
    spec = start().loaded.spec
    scribe = Scribe(tokenizer, spec)
    whole, apart = Turn("", "a circle"), Turn("", "a circle", spelled=((2, 8),))
    letters = [token for letter in "circle" for token in tokenizer.encode(letter)]
    assert scribe.spell(apart) == tokenizer.encode("a ") + letters
    assert scribe.spell(whole) == tokenizer.encode("a circle") != scribe.spell(apart)
    assert tokenizer.decode(scribe.spell(apart)) == "a circle"


def test_some_dialogues_begin_with_another_system_message() -> None:
    begun = {text(write(seed=seed).tokens[:30]) for seed in range(30)}
    assert len(begun) > 2
    assert len({text(write(scored=True, seed=seed).tokens[:30]) for seed in range(30)}) == 1


@pytest.mark.parametrize("scored", [False, True])
def test_equal_chance_writes_the_same(scored: bool) -> None:
    once, again = write(scored), write(scored)
    assert np.array_equal(once.tokens, again.tokens)


def test_a_large_image_is_one_image_in_several_pieces() -> None:
    """All of its tokens have one number, and each finds its own piece's latents in a shard."""
    spec, latents = start().loaded.spec, 4
    large = Image.new("RGB", (4 * SIZE, 2 * SIZE), "green")
    example = Example(
        "any", (RED, large, BLUE), (Turn("What?", "Red.", shows=(0, 1)), Turn("?", "B", (2,)))
    )
    made = Scribe(TOKENIZER, spec).write(
        example, latents, random.Random(1), crops=Crops(3 * SIZE, 2)
    )
    assert [int((made.image_of == k).sum()) for k in (1, 2, 5)] == [4, 12, 4]
    assert set(made.image_of.tolist()) == {0, 1, 2, 5} and len(made.pixels) == 5
    packer = Packer(Packing(rows=1, tokens=512, images=8, shards=1), SIZE, latents)
    shard, _ = packer.pack(iter([made]))
    assert shard.latent[shard.latent >= 0].tolist() == list(range(5 * latents))
    assert shard.pixels[5:].sum() == 0 and shard.pixels[4, 2].min() == 255

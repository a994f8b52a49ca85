"""What shards are drawn from: the skills of the mixture, and pictures exactly as served."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path

import numpy as np
import pytest
import torch

from mmserve.config import ImageLimits
from mmserve.engine.vision_pipeline import VisionPipeline
from mmserve.model.spec import read_vision
from mmserve.prompt import ChatTemplate, ImagePart, Message, TextPart
from mmserve.request import ImageSegment, TextSegment
from mmserve.vision.crops import Crops
from mmserve.vision.decoder import DecodeHere
from mmserve.vision.train.assets import Assets
from mmserve.vision.train.dialogue import Dialogue
from mmserve.vision.train.example import Example, Turn
from mmserve.vision.train.export import description
from mmserve.vision.train.learner import seen_by
from mmserve.vision.train.skills import SKILLS
from mmserve.vision.train.stage import Packing, Stage
from tests.model.dense import image_mask
from tests.vision.images import encode, noise
from tests.vision.train.tiny import CUT, DATA, SIZE, STAGE, drawing, drawing_from, start, tiny_words

LATENTS = CUT.latents.sizes[-1]
SMALL = noise(SIZE, SIZE // 2, seed=1)


def served_by(stage: Stage) -> VisionPipeline:
    """Of the model that the stage leaves."""
    vision = read_vision(description(DATA, stage)["vision"])
    return VisionPipeline(
        DecodeHere(ImageLimits()),
        size=vision.image_size,
        num_tokens=vision.tokens_of(),
        settings_id=bytes(32),
        crops=vision.crops_within(),
    )


@pytest.mark.parametrize(
    ("width", "height", "pieces"),
    [
        (4 * SIZE, 3 * SIZE, 5),
        (3 * SIZE, 5 * SIZE, 5),
        (6 * SIZE, SIZE, 5),
        (SIZE, 3 * SIZE, 4),
        (2 * SIZE + 1, 20, 4),
        (2 * SIZE, 2 * SIZE, 1),
        (10, 2 * SIZE, 1),
    ],
)
def test_a_row_is_what_the_server_makes_of_the_same_pictures(
    width: int, height: int, pieces: int, tmp_path: Path
) -> None:
    made = Example("any", (noise(width, height), SMALL), (Turn("What?", "Red.", (0, 1)),))
    drawn = drawing(tmp_path, CUT)
    dialogue = drawn.dialogue(made, LATENTS, random.Random(0), scored=True)
    pipeline, spec = served_by(CUT), start().loaded.spec
    images = [pipeline.prepare(encode(image, "PNG")) for image in made.images]
    assert [image.num_tokens for image in images] == [pieces * LATENTS, LATENTS]
    shown = np.concatenate([pipeline.pixels(image).numpy() for image in images])
    assert np.array_equal(np.stack(dialogue.pixels), shown)

    template = ChatTemplate(
        tiny_words(),
        system=spec.system_prompt,
        image_prefix=spec.image_prefix,
        image_suffix=spec.image_suffix,
    )
    asked = [Message("user", (ImagePart(b""), ImagePart(b""), TextPart("What?")))]
    tokens, image_of = list[int](), list[int]()
    for segment in template.render(asked, images).segments:
        if isinstance(segment, TextSegment):
            tokens += segment.token_ids
            image_of += [0] * len(segment.token_ids)
        else:
            assert isinstance(segment, ImageSegment)
            tokens += [0] * segment.image.num_tokens
            image_of += [1 + images.index(segment.image)] * segment.image.num_tokens

    shard, _ = drawn.packer.pack(iter([dialogue]))
    length = len(tokens)
    row = shard._replace(**{k: v[:, :length] for k, v in shard._asdict().items() if k != "pixels"})
    assert row.tokens[0].tolist() == tokens and row.positions[0].tolist() == list(range(length))
    assert torch.equal(seen_by(row.dialogue, row.image)[0, 0], image_mask(image_of))
    assert row.latent[row.latent >= 0].tolist() == list(range((pieces + 1) * LATENTS))
    assert torch.equal(shard.pixels[: pieces + 1], torch.from_numpy(shown))


def test_a_picture_in_pieces_has_all_latents_and_others_as_many_as_were_drawn(
    tmp_path: Path,
) -> None:
    drawn = drawing(tmp_path, CUT)

    def counts(width: int) -> list[int]:
        made = Example("any", (noise(width, SIZE), SMALL), (Turn("What?", "Red.", (0, 1)),))
        image_of = drawn.dialogue(made, 2, random.Random(0)).image_of
        return [len([*run]) for number, run in groupby(image_of.tolist()) if number]

    assert counts(2 * SIZE + 1) == [4 * LATENTS, LATENTS]
    assert counts(2 * SIZE) == [2, 2]


def test_a_stage_with_crops_draws_the_same_where_nothing_is_large(tmp_path: Path) -> None:
    plain, cut = (
        drawing(tmp_path, replace(STAGE, crops=crops)).shard(3) for crops in (None, Crops(448, 2))
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, cut, strict=True))


def test_pictures_are_enlarged_that_would_be_seen_as_a_whole(assets: Assets) -> None:
    mixture = {"colour": (1.0, 1.0), "small_text": (1.0, 1.0), "two_images": (1.0, 1.0)}
    stage = replace(CUT, mixture=mixture, crops=Crops(448, 4), packing=Packing(tokens=4096))
    before, after = (
        [*islice(drawing_from(assets, replace(stage, enlarged=share))._dialogues(1, 0.0), 40)]
        for share in (0.0, 1.0)
    )

    def pieces(found: Sequence[Dialogue], skill: str) -> set[int]:
        return {len(one.pixels) for one in found if one.skill == skill}

    assert pieces(before, "colour") == {1} and pieces(before, "two_images") == {2}
    assert pieces(after, "colour") == {5} and pieces(after, "two_images") == {2}
    assert pieces(after, "small_text") == pieces(before, "small_text") != {1}


def test_large_pictures_are_drawn_where_the_mixture_names_them(assets: Assets) -> None:
    named = drawing_from(assets, replace(CUT, mixture={"*": (1, 1), "small_text": (2, 2)}))
    assert named.weights(0.5) == dict.fromkeys(SKILLS, 1) | {"small_text": 2}
    made = islice(drawing_from(assets, CUT)._dialogues(1, 0.0), 30)
    assert {dialogue.skill for dialogue in made} == {"colour", "small_text", "small_emoji"}


def test_a_mixture_of_what_there_is_not_or_is_not_seen_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no skill is called colours; .*small_text"):
        drawing(tmp_path, replace(STAGE, mixture={"colours": (1, 1)}))
    with pytest.raises(ValueError, match="small_text is for a model that sees crops"):
        drawing(tmp_path, replace(STAGE, mixture={"*": (1, 1), "small_text": (1, 1)}))

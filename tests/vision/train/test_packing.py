"""Rows of dialogues: all of each, once, and never more than there is room for."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.vision.train.dialogue import Dialogue
from mmserve.vision.train.feed import Feed, joined
from mmserve.vision.train.packing import Packer, Shard
from mmserve.vision.train.stage import Packing

LATENTS, SIZE = 4, 2
SHAPE = Packing(rows=3, tokens=40, images=5, shards=2)


def dialogue(number: int, before: int, images: int, after: int) -> Dialogue:
    """Tokens number * 100 and on; each image has as many latents as its number says."""
    image_of = [0] * before
    for k in range(images):
        image_of += [k + 1] * (1 + (number + k) % LATENTS) + [0]
    image_of += [0] * after
    of = np.array(image_of, np.int32)
    tokens = np.where(of > 0, 0, 100 * number + np.arange(len(of))).astype(np.int32)
    pixels = tuple(np.full((3, SIZE, SIZE), 10 * number + k, np.uint8) for k in range(images))
    return Dialogue(str(number), tokens, of, np.arange(len(of)) == len(of) - 1, pixels)


DIALOGUES = st.lists(
    st.tuples(st.integers(1, 12), st.integers(0, 3), st.integers(1, 12)), min_size=1, max_size=12
).map(lambda rows: [dialogue(i + 1, *row) for i, row in enumerate(rows)])


def found(shard: Shard, row: int, number: int) -> torch.Tensor:
    return (shard.dialogue[row] == number).nonzero().flatten()


@settings(max_examples=60)
@given(DIALOGUES)
def test_each_dialogue_that_is_in_a_shard_is_whole_and_alone(dialogues: list[Dialogue]) -> None:
    shard, skills = Packer(SHAPE, SIZE, LATENTS).pack(iter(dialogues))
    by_name = {d.skill: d for d in dialogues}
    seen: list[int] = []
    for row, names in enumerate(skills):
        assert int((shard.dialogue[row] >= 0).sum()) == sum(
            len(by_name[name].tokens) for name in names
        )
        for number, name in enumerate(names):
            there, d = found(shard, row, number), by_name[name]
            assert shard.tokens[row, there].tolist() == d.tokens.tolist()
            assert shard.answers[row, there].tolist() == d.answers.tolist()
            assert shard.positions[row, there].tolist() == list(range(len(d.tokens)))
            for k, pixels in enumerate(d.pixels):
                mine = there[torch.from_numpy(d.image_of == k + 1)]
                (image,) = set(shard.image[row, mine].tolist())
                seen.append(image)
                assert torch.equal(shard.pixels[image - 1], torch.from_numpy(pixels))
                places = (image - 1) * LATENTS + torch.arange(len(mine))
                assert shard.latent[row, mine].tolist() == places.tolist()
    assert sorted(seen) == list(range(1, len(seen) + 1)) and len(seen) <= SHAPE.images
    assert not shard.answers[shard.dialogue < 0].any()
    assert ((shard.latent >= 0) == (shard.image > 0)).all()


def test_what_finds_no_room_is_left_out() -> None:
    large = [dialogue(n, 20, 0, 16) for n in range(1, 9)]
    _, skills = Packer(SHAPE, SIZE, LATENTS).pack(iter(large))
    assert [len(names) for names in skills] == [1, 1, 1]
    _, skills = Packer(SHAPE, SIZE, LATENTS).pack(
        iter([dialogue(1, 60, 0, 1), dialogue(2, 1, 1, 1)])
    )
    assert sorted(name for names in skills for name in names) == ["2"]


def test_shards_of_an_update_keep_their_images_apart() -> None:
    packer = Packer(SHAPE, SIZE, LATENTS)
    one, other = (packer.pack(iter([dialogue(n, 3, 2, 3)]))[0] for n in (1, 2))
    both = joined([one, other], LATENTS)
    images = sorted(set(both.image[both.image > 0].tolist()))
    assert images == [1, 2, SHAPE.images + 1, SHAPE.images + 2]
    assert both.pixels[SHAPE.images].flatten()[0] == 20
    assert int(both.latent.max()) // LATENTS == SHAPE.images + 1
    feed = Feed(iter([one, other]), 2, LATENTS, torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(feed.batch(), both, strict=True))
    assert feed.taken == 2

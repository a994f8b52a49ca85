"""What is learned is what is served: rows side by side give what each dialogue alone gives, by the
engine's own dense statement, and the base model is what is left without the LoRA."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmserve.model.lora import merge_lora
from mmserve.model.spec import read_vision
from mmserve.request import ImageInput, ImageSegment, Segment, TextSegment
from mmserve.train_drafter.writing import Chat
from mmserve.vision.model import VisionModel
from mmserve.vision.train.augment import augment
from mmserve.vision.train.dialogue import Dialogue
from mmserve.vision.train.example import Split
from mmserve.vision.train.growth import grown
from mmserve.vision.train.learner import Learner, seen_by
from mmserve.vision.train.lora import Lora
from mmserve.vision.train.packing import Shard
from mmserve.vision.train.skills import example
from mmserve.vision.train.texts import pack_texts, parted
from tests.engine.tiny import tiny_lm
from tests.model.dense import dense_logits, embed, image_mask
from tests.vision.train.tiny import DATA, STAGE, drawing, start

CPU = torch.device("cpu")


def learner() -> Learner:
    begun = start()
    vision = VisionModel(read_vision(DATA["vision"])).eval()
    vision.load_weights(begun.vision)
    lm: Any = begun.loaded.lm
    lm.config._attn_implementation = "sdpa"
    return Learner(vision, lm, Lora(lm, begun.adapter, 8.0), CPU)


def dialogues(folder: Path, counts: tuple[int, ...]) -> list[Dialogue]:
    made = drawing(folder)
    skills = ("colour", "shape", "count")
    examples = [
        example(skill, Split.TRAIN, seed=1, index=i, assets=made.assets)
        for i, skill in enumerate(skills[: len(counts)])
    ]
    write = made.scribe.write
    return [
        write(e, n, random.Random(i)) for i, (e, n) in enumerate(zip(examples, counts, strict=True))
    ]


def packed(folder: Path, made: list[Dialogue]) -> Shard:
    shard, skills = drawing(folder).packer.pack(iter(made))
    assert sum(map(len, skills)) == len(made)
    return shard


def dense(made: Dialogue, model: Learner) -> Tensor:
    """Logits [n, vocab] of one dialogue by itself, as served."""
    begun = start()
    loaded: Any = begun.loaded
    merge_lora(loaded.lm, begun.adapter, 8.0)
    object.__setattr__(loaded, "vision", model.vision)
    segments: list[Segment] = []
    at, number = 0, 0
    while at < len(made.tokens):
        image, end = made.image_of[at], at
        while end < len(made.tokens) and made.image_of[end] == image:
            end += 1
        if image:
            pixels = made.pixels[number][None]
            segments.append(ImageSegment(ImageInput(b"", b"", end - at, pixels)))
            number += 1
        else:
            segments.append(TextSegment(tuple(made.tokens[at:end].tolist())))
        at = end
    return dense_logits(loaded, *embed(loaded, segments))


@torch.no_grad()
def test_a_packed_dialogue_gives_what_it_gives_alone_when_served(tmp_path: Path) -> None:
    model, made = learner(), dialogues(tmp_path, (4, 2))
    shard = packed(tmp_path, made)
    seen = model.see(shard.pixels / model.vision.scale - model.vision.shift)
    # A shard's images have room for as many latents as the stage's; this model has only 4.
    room = STAGE.latents.sizes[-1]
    seen = torch.cat([seen, seen.new_zeros(len(seen), room - seen.shape[1], seen.shape[2])], 1)
    hidden = model._hidden(shard, seen, None)
    logits = model.lm.get_output_embeddings()(hidden)
    for number, dialogue in enumerate(made):
        row, there = (shard.dialogue == number).nonzero(as_tuple=True)
        ours = logits[row, there]
        torch.testing.assert_close(ours, dense(dialogue, model), rtol=1e-3, atol=1e-3)


def test_the_mask_of_one_dialogue_is_the_served_models() -> None:
    image_of = [0, 1, 1, 2, 2, 2, 0, 0]
    image = torch.tensor([image_of])
    assert torch.equal(seen_by(torch.zeros_like(image), image)[0, 0], image_mask(image_of))
    apart = seen_by(torch.tensor([[0, 0, 1, 1, -1]]), torch.zeros(1, 5, dtype=torch.long))[0, 0]
    assert apart.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]


@torch.no_grad()
def test_without_the_lora_text_is_the_base_models() -> None:
    model = learner()
    rows = pack_texts([Chat("text", ((1, 2, 3),), (4, 5, 2)), Chat("text", ((7, 8),), (9, 2))], 16)
    assert (
        len(rows.tokens) == 1 and (rows.dialogue[0, :10] == torch.tensor([0] * 6 + [1] * 4)).all()
    )
    states = model.base_states(rows)
    first = rows.tokens[:, :6].long()
    base = tiny_lm().model(first).last_hidden_state
    torch.testing.assert_close(states[0, :6], base[0], rtol=1e-3, atol=1e-3)
    whole = rows._replace(states=states)
    assert model.divergence(whole) > 1e-4
    with model.lora.left_out():
        assert model.divergence(whole) == pytest.approx(0, abs=1e-5)


def test_what_is_frozen_gets_no_gradient_and_all_else_does(tmp_path: Path) -> None:
    model, shard = learner(), packed(tmp_path, dialogues(tmp_path, (2,)))
    shard = shard._replace(latent=torch.where(shard.latent >= 0, shard.latent % 8, -1))
    groups = model.groups(("visual.trunk.conv_stem", "visual.trunk.blocks.0"))
    losses = model.losses(shard, None, torch.Generator().manual_seed(0))
    losses.answers.backward()  # type: ignore[no-untyped-call]
    named = dict(model.vision.named_parameters())
    assert named["visual.trunk.conv_stem.weight"].grad is None
    assert all(p.grad is not None for p in groups["lora"])
    assert named["resampler.latents"].grad is not None
    assert sum(p.numel() for p in groups["encoder"]) < sum(
        p.numel() for p in model.vision.visual.parameters()
    )
    with pytest.raises(ValueError, match="has no part visual.trunk.head"):
        model.groups(("visual.trunk.head",))


@torch.no_grad()
def test_an_answer_is_right_where_all_its_tokens_are_the_likeliest(tmp_path: Path) -> None:
    model, shard = learner(), packed(tmp_path, dialogues(tmp_path, (4, 4)))
    shard = shard._replace(latent=torch.where(shard.latent >= 0, shard.latent // 8 * 4, -1))
    assert model.whole_answers(shard).sum() == 0  # it has learned nothing
    pixels = shard.pixels / model.vision.scale - model.vision.shift
    hidden = model._hidden(shard, model.see(pixels), None)
    said = model.lm.get_output_embeddings()(hidden).argmax(-1).roll(1, 1).int()
    # One answer token of the first, and all of none: what it would say stands there.
    last = [(shard.answers & (shard.dialogue == n)).flatten().nonzero()[-1] for n in (0, 1)]
    answers = torch.zeros_like(shard.answers)
    answers.view(-1)[torch.cat(last)] = True
    tokens = shard.tokens.clone()
    tokens.view(-1)[last[0]] = said.view(-1)[last[0]]
    assert model.whole_answers(shard._replace(tokens=tokens, answers=answers)).tolist() == [
        [True, False]
    ]


def test_more_latents_begin_as_their_neighbours() -> None:
    begun = start()
    before = read_vision(DATA["vision"]).compressor
    assert grown(begun.vision, before, before).keys() == begun.vision.keys()
    more = {**DATA["vision"], "compressor": {**DATA["vision"]["compressor"], "latent_grid": [4, 2]}}
    more["compressor"]["nested"] = [2, 4, 8]
    after = read_vision(more).compressor
    made = grown(begun.vision, before, after)
    assert made["resampler.latents"].shape == (8, 32)
    VisionModel(read_vision(more)).load_weights(made)
    old = begun.vision["resampler.latents"]
    nearest = torch.cdist(made["resampler.latents"], old).argmin(1)
    assert set(nearest.tolist()) == {0, 1, 2, 3}


def test_pictures_change_a_little_and_by_the_generator_alone() -> None:
    pixels = torch.full((16, 3, 24, 24), 128, dtype=torch.uint8)
    pixels[:, 0, 8:16, 8:16] = 250
    once, again, other = (
        augment(pixels, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(once, again) and not torch.equal(once, other)
    assert (once >= 0).all() and (once <= 255).all()
    assert (once - pixels).abs().mean() < 12
    assert (once[:, 0, 11:13, 11:13].mean((1, 2)) > once[:, 0, :2, :2].mean((1, 2)) + 60).all()


def test_some_chats_are_only_measured() -> None:
    chats = [Chat("text", ((i,),), (2,)) for i in range(41)]
    learned, held = parted(chats)
    assert len(held) == 2 and len(learned) == 39 and not set(held) & set(learned)
    with pytest.raises(ValueError, match="no chat"):
        pack_texts([], 8)

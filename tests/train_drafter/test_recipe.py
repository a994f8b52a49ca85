"""The whole recipe, on a tiny model: heads that guess ever more of what it writes."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mmserve.config import EngineConfig, ImageLimits, ModelConfig, SchedulerConfig
from mmserve.engine.engine import Engine
from mmserve.engine.heads import load_head
from mmserve.model.weights import load
from mmserve.request import ImageInput, ImageSegment, Segment, TextSegment
from mmserve.spec.drafter import Context, Landed, Wanted
from mmserve.spec.eagle import load_eagle
from mmserve.spec.head_files import read_head
from mmserve.spec.medusa import load_medusa
from mmserve.spec.target_parts import TargetParts
from mmserve.train_drafter import recipe, writing
from mmserve.train_drafter.features import Collector
from mmserve.train_drafter.pictures import picture
from mmserve.train_drafter.recipe import Options, train_on
from mmserve.train_drafter.writing import Chat, Writer
from mmserve.vision.preprocess import decode
from tests.engine.tiny import HIDDEN, LAYERS, VOCAB, tiny_config, tiny_model
from tests.model import families
from tests.model.dense import dense_logits, embed


def counting_model() -> Any:
    """A tiny model that mostly says the token two behind the last one, whatever was before."""
    loaded = tiny_model()
    lm: Any = loaded.lm
    for layer in lm.model.layers:
        layer.self_attn.o_proj.weight.data.mul_(0.1)
        layer.mlp.down_proj.weight.data.mul_(0.1)
    embedding = lm.get_input_embeddings().weight.data
    lm.lm_head.weight = torch.nn.Parameter(embedding.roll(2, 0), requires_grad=False)
    return loaded


@pytest.fixture(scope="module")
def chats() -> list[Chat]:
    config = tiny_config(text_pages=400, max_num_seqs=16)
    return list(Writer(Engine(config, counting_model()), 1, 32, images=True).write(1200, math.inf))


def options(folder: Path, method: str, **changes: Any) -> Options:
    small = Options(
        method,
        folder / "head",
        folder / "work",
        minutes=60,
        vocab=200,
        steps=2,
        updates=40,
        rate=5e-3,
        batch_tokens=2048,
        row=256,
    )
    return dataclasses.replace(small, **changes)


def train(chats: list[Chat], of: Options) -> dict[str, float]:
    torch.manual_seed(0)
    return train_on(chats, counting_model(), of, time.monotonic())


def tiny_parts() -> TargetParts:
    lm = counting_model().lm
    matrix = lm.get_output_embeddings().weight
    return TargetParts(
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        vocab_size=VOCAB,
        embed=lm.get_input_embeddings(),
        logits=lambda x: x @ matrix.T,
        head_rows=lambda ids: matrix[ids],
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_more_training_more_is_accepted(tmp_path: Path, chats: list[Chat], method: str) -> None:
    little = train(chats, options(tmp_path / "little", method, updates=1))
    much = train(chats, options(tmp_path / "much", method))
    assert set(much) == {"text", "image"}
    assert much["text"] > little["text"] + 0.1
    file = read_head(tmp_path / "much" / "head")
    if method == "eagle":
        head = load_eagle(file, tiny_parts())
        assert head.config.taps == (-1,)
        assert head.ids is not None and len(head.ids) == 200
    else:
        assert load_medusa(file, tiny_parts()).num_heads == 2
    assert (tmp_path / "much" / "head" / "model.safetensors").stat().st_size < 400_000


def test_a_training_that_was_broken_off_goes_on_where_it_ended(
    tmp_path: Path, chats: list[Chat]
) -> None:
    said: list[str] = []
    train(chats, options(tmp_path, "eagle", updates=3))
    state = torch.load(tmp_path / "work" / "eagle_-1.pt", weights_only=True)
    assert state["updates"] == 3
    further = options(tmp_path, "eagle", updates=5)
    train_on(chats, counting_model(), further, time.monotonic(), said.append)
    assert "going on from update 3" in said
    assert torch.load(tmp_path / "work" / "eagle_-1.pt", weights_only=True)["updates"] == 5


def test_equal_seeds_make_equal_heads(tmp_path: Path, chats: list[Chat]) -> None:
    tensors = []
    for name in ("a", "b"):
        train(chats[:40], options(tmp_path / name, "eagle", updates=4))
        tensors.append(read_head(tmp_path / name / "head").tensors)
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


def test_other_layers_can_be_read(tmp_path: Path, chats: list[Chat]) -> None:
    train(chats[:40], options(tmp_path, "eagle", updates=2, taps=(0, 1, -1)))
    head = load_eagle(read_head(tmp_path / "head"), tiny_parts())
    assert head.config.taps == (0, 1, -1)
    assert head.fc is not None


def test_a_layer_that_is_not_there_is_refused(tmp_path: Path, chats: list[Chat]) -> None:
    with pytest.raises(ValueError, match="tiny has layers 0 to 2, no 3"):
        train(chats, options(tmp_path, "eagle", taps=(0, 3)))


def test_what_is_collected_is_what_the_model_makes_of_each_token(chats: list[Chat]) -> None:
    loaded = counting_model()
    some = [next(c for c in chats if c.kind == kind) for kind in ("text", "image")]
    corpus = Collector(loaded, (-1,), torch.float32, 10_000).collect(some)
    order = sorted(some, key=lambda chat: chat.kind)
    lm: Any = loaded.lm
    for chat, first, end in zip(order, corpus.starts[:-1], corpus.starts[1:], strict=True):
        embeds, image_of = embed(loaded, list(map(_segment, (*chat.pieces, chat.answer))))
        text = torch.tensor(image_of) == 0
        want = dense_logits(loaded, embeds, image_of)[text]
        got = lm.get_output_embeddings()(corpus.finals[first:end])
        assert torch.allclose(got, want, atol=1e-3)
        assert corpus.tokens[first:end][corpus.answers[first:end]].tolist() == list(chat.answer)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_a_public_checkpoint_gets_a_head_from_its_own_texts(tmp_path: Path, family: str) -> None:
    config = EngineConfig(model=ModelConfig(model=str(families.build(family, tmp_path))))
    config = dataclasses.replace(config, scheduler=SchedulerConfig(max_num_seqs=8))
    of = options(tmp_path, "eagle", updates=2, longest=12, tokens=120, vocab=100)
    recipe.train(of, config)
    kept = writing.read(of.work / "chats.jsonl")
    assert kept and all(chat.kind == "text" for chat in kept)
    runner = Engine(config, load(config.model)).runner
    drafter = load_head("eagle", str(of.out), runner, family)
    chat = kept[0]
    known = [t for piece in chat.pieces if not isinstance(piece, int) for t in piece]
    context = Context("a", known, 1)
    states = torch.randn(len(known) - 1, runner.adapter.hidden_size)
    drafter.landed(context, Landed(None, (), (), 0, states))
    (draft,) = drafter.propose([Wanted(context, 3)])
    assert draft is not None and len(draft) == 3


def _segment(piece: tuple[int, ...] | int) -> Segment:
    if not isinstance(piece, int):
        return TextSegment(piece)
    pixels = decode(picture(piece), ImageLimits(), 8)[None]
    return ImageSegment(ImageInput(b"", b"", 20, pixels))

"""A whole stage on a tiny model: it learns, goes on where it ended, and leaves a model to serve."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mmserve.engine.engine import Engine
from mmserve.model.lora import merge_lora
from mmserve.model.spec import read_vision
from mmserve.prompt import ImagePart, Message, TextPart
from mmserve.request import ImageInput
from mmserve.train_drafter.writing import Chat
from mmserve.vision.model import VisionModel
from mmserve.vision.train.assets import Assets
from mmserve.vision.train.example import Example, Split
from mmserve.vision.train.learner import Learner
from mmserve.vision.train.lora import Lora
from mmserve.vision.train.recipe import Options, _Clock, train_from
from mmserve.vision.train.skills import example
from mmserve.vision.train.stage import Stage
from tests.engine.driver import Driver
from tests.engine.tiny import tiny_config, tiny_lm
from tests.vision.images import encode
from tests.vision.train.tiny import CUT, STAGE, assets, drawing_from, start

CHATS = [Chat("text", ((1, 40 + i, 41, 42), (50, 51)), (60, 61 + i, 2)) for i in range(8)]


def run(
    folder: Path, stage: Stage = STAGE, drawn: Assets | None = None, **options: Any
) -> dict[str, float]:
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    own = {"minutes": 30.0, "workers": 0, "probed": 1, "assets": folder / "assets.zip", **options}
    made = Options(out=folder / "out", work=folder, **own)
    return train_from(start(), stage, made, drawn or assets(folder), lambda: CHATS, _Clock())


def log(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    run(folder, replace(STAGE, updates=40))
    return folder


def test_the_loss_falls(trained: Path) -> None:
    first, *_, last = log(trained)
    assert last["update"] == 40 and last["loss"] < first["loss"]
    assert last["factor"] < 0.01
    assert (trained / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")
    probed = json.loads((trained / "out" / "probe.json").read_text("utf-8"))
    assert probed["divergence"] >= 0 and 0 <= probed["colour"] <= 1


def test_what_is_written_is_what_serving_reads(trained: Path) -> None:
    folder = trained / "out"
    data = json.loads((folder / "tiny.json").read_text("utf-8"))
    vision = read_vision(data["vision"])
    assert vision.tokens_of()["low"] == 2 and vision.num_tokens == 8
    model = VisionModel(vision)
    model.load_weights(
        {k: v for f in data["vision"]["files"] for k, v in load_file(folder / f).items()}
    )
    assert model.encode(torch.zeros(1, 3, 64, 64, dtype=torch.uint8)).isfinite().all()
    lm = tiny_lm()
    merge_lora(lm, load_file(folder / data["lora"]["file"]), data["lora"]["alpha"])
    change = lm.model.layers[0].mlp.up_proj.weight - tiny_lm().model.layers[0].mlp.up_proj.weight
    assert change.abs().max() > 0
    frozen = start().vision["visual.conv_stem.weight"]
    assert torch.equal(model.visual.trunk.conv_stem.weight, frozen.bfloat16().float())


def test_a_training_that_was_ended_goes_on_where_it_was(tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    run(cut, replace(STAGE, updates=2))
    state = torch.load(cut / "state.pt", weights_only=True)
    assert (state["updates"], state["taken"]) == (2, 4)
    run(cut, replace(STAGE, updates=4))
    state = torch.load(cut / "state.pt", weights_only=True)
    assert (state["updates"], state["taken"]) == (4, 8)
    with pytest.raises(ValueError, match="is of tiny, not of other"):
        run(cut, replace(STAGE, name="other"))


def test_equal_seeds_make_equal_weights(tmp_path: Path) -> None:
    made = []
    for name in ("a", "b"):
        run(tmp_path / name, replace(STAGE, updates=2))
        made.append(load_file(tmp_path / name / "out" / "tiny" / "resampler.safetensors"))
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


def test_without_time_there_is_a_model_nevertheless(tmp_path: Path) -> None:
    run(tmp_path, minutes=0.0)
    assert torch.load(tmp_path / "state.pt", weights_only=True)["updates"] == 0
    assert (tmp_path / "out" / "tiny.json").is_file()


def served(folder: Path) -> Any:
    """What the loader makes of a trained model's files."""
    data = json.loads((folder / "tiny.json").read_text("utf-8"))
    config = read_vision(data["vision"])
    vision = VisionModel(config).eval()
    vision.load_weights(
        {k: v for f in data["vision"]["files"] for k, v in load_file(folder / f).items()}
    )
    loaded: Any = start().loaded
    merge_lora(loaded.lm, load_file(folder / data["lora"]["file"]), data["lora"]["alpha"])
    said = {
        "vision": config,
        "num_image_tokens": config.num_tokens,
        "image_tokens": config.tokens_of,
        "image_crops": config.crops_within,
    }
    spec = type(loaded.spec)(**{**vars(loaded.spec), **said})
    return replace(loaded, vision=vision, spec=spec)


@torch.no_grad()
def trained_on(folder: Path, vision: VisionModel, drawn: Assets, made: Example) -> Tensor:
    """Logits [vocab] behind the question, as training reckons them from a shard of one example."""
    lm: Any = tiny_lm()
    lm.config._attn_implementation = "sdpa"
    adapter = load_file(folder / "tiny" / "adapter_model.safetensors")
    model = Learner(vision, lm, Lora(lm, adapter, 8.0), torch.device("cpu"))
    drawing = drawing_from(drawn, CUT)
    written = drawing.dialogue(made, 2, random.Random(0), scored=True)
    shard, skills = drawing.packer.pack(iter([written]))
    assert [*map(len, skills)] == [1]
    hidden = model._hidden(shard, model.see(shard.pixels / vision.scale - vision.shift), None)
    asked = int(shard.answers[0].nonzero()[0]) - 1
    logits: Tensor = lm.get_output_embeddings()(hidden[0, asked])
    return logits


def test_a_large_picture_is_served_in_the_pieces_that_it_was_trained_in(
    tmp_path: Path, assets: Assets
) -> None:
    probed = run(tmp_path, replace(CUT, updates=2), drawn=assets)
    assert probed.keys() == {"divergence", "colour", "small_text", "small_emoji"}
    loaded = served(tmp_path / "out")
    driver = Driver(Engine(tiny_config(), loaded))
    made = example("small_text", Split.HELD_OUT, seed=1, index=0, assets=assets)
    image: ImageInput = driver.engine.pipeline.prepare(encode(made.images[0], "PNG"))
    assert image.num_tokens == 5 * loaded.spec.num_image_tokens
    asked = [Message("user", (ImagePart(b""), TextPart(made.turns[0].question)))]
    driver.ask(*driver.engine.border.template.render(asked, [image]).segments)
    ours = trained_on(tmp_path / "out", loaded.vision, assets, made)
    torch.testing.assert_close(driver.logits["0"][0], ours, rtol=1e-3, atol=1e-3)

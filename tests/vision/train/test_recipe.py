"""A whole stage on a tiny model: it learns, goes on where it ended, and leaves a model to serve."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mmserve.model.lora import merge_lora
from mmserve.model.spec import read_vision
from mmserve.train_drafter.writing import Chat
from mmserve.vision.model import VisionModel
from mmserve.vision.train.recipe import Options, _Clock, train_from
from mmserve.vision.train.stage import Stage
from tests.engine.tiny import tiny_lm
from tests.vision.train.tiny import STAGE, assets, start

CHATS = [Chat("text", ((1, 40 + i, 41, 42), (50, 51)), (60, 61 + i, 2)) for i in range(8)]


def run(folder: Path, stage: Stage = STAGE, **options: Any) -> dict[str, float]:
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    own = {"minutes": 30.0, "workers": 0, "probed": 1, "assets": folder / "assets.zip", **options}
    made = Options(out=folder / "out", work=folder, **own)
    return train_from(start(), stage, made, assets(folder), lambda: CHATS, _Clock())


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

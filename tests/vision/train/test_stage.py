"""A stage's JSON: what it may say, and what the mixture is at any time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.vision.train.skills import SKILLS
from mmserve.vision.train.stage import Packing, load_stage
from tests.vision.train.tiny import STAGE

SHIPPED = sorted((Path(__file__).parents[3] / "configs" / "train").glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_stage_names_skills_that_there_are(path: Path) -> None:
    stage = load_stage(path)
    assert stage.mixture.keys() <= {*SKILLS, "*"}
    assert all(weight > 0 for weight in stage.weights(SKILLS, 1.0).values())
    assert sum(stage.latents.chances.values()) == pytest.approx(1)
    rows, columns = stage.latents.grid
    assert stage.latents.sizes[-1] == rows * columns
    assert stage.packing.images * 3 > stage.packing.rows


def changed(tmp_path: Path, **words: object) -> Path:
    data = json.loads(SHIPPED[0].read_text("utf-8")) | words
    path = tmp_path / "stage.json"
    path.write_text(json.dumps(data), "utf-8")
    return path


@pytest.mark.parametrize(
    "words",
    [
        {"rate": 1},
        {"mixture": {}},
        {"mixture": {"colour": -1}},
        {"rates": {"lora": 1}},
        {"latents": 3},
    ],
)
def test_a_stage_that_says_something_else_is_refused(
    tmp_path: Path, words: dict[str, object]
) -> None:
    with pytest.raises(ValueError, match="is no stage of training"):
        load_stage(changed(tmp_path, **words))


def test_what_is_left_out_is_as_usual(tmp_path: Path) -> None:
    assert load_stage(changed(tmp_path, packing={})).packing == Packing()


@given(st.floats(-1, 2))
def test_weights_go_from_the_first_to_the_last(progress: float) -> None:
    first, now, last = (STAGE.weights(["count", "other"], p) for p in (0, progress, 1))
    assert last["count"] <= now["count"] <= first["count"]
    assert now["other"] == 0  # no star, so nothing for those that are not named

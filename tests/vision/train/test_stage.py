"""A stage's JSON: what it may say, and what the mixture is at any time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.vision.crops import Crops
from mmserve.vision.train.skills import LARGE, SKILLS, mixed
from mmserve.vision.train.stage import Packing, load_stage
from tests.vision.train.tiny import STAGE

SHIPPED = sorted((Path(__file__).parents[3] / "configs" / "train").glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_stage_names_skills_that_there_are(path: Path) -> None:
    stage = load_stage(path)
    assert stage.mixture.keys() <= {*SKILLS, *LARGE, "*"}
    assert stage.crops is not None or not stage.mixture.keys() & LARGE.keys()
    assert all(weight > 0 for weight in stage.weights(mixed(stage.mixture), 1.0).values())
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
        {"crops": 3},
        {"crops": None},
        {"crops": {"most": 4}},
        {"crops": {"above": 448, "most": 1}},
        {"enlarged": 0.1},
        {"enlarged": 1.1, "crops": {"above": 448, "most": 4}},
        {"enlarged": "half", "crops": {"above": 448, "most": 4}},
    ],
)
def test_a_stage_that_says_something_else_is_refused(
    tmp_path: Path, words: dict[str, object]
) -> None:
    with pytest.raises(ValueError, match="is no stage of training"):
        load_stage(changed(tmp_path, **words))


def test_what_is_left_out_is_as_usual(tmp_path: Path) -> None:
    stage = load_stage(changed(tmp_path, packing={}))
    assert stage.packing == Packing() and stage.crops is None


def test_large_images_are_cut_up_where_a_stage_says_how(tmp_path: Path) -> None:
    stage = load_stage(changed(tmp_path, crops={"above": 448, "most": 4}))
    assert stage.crops == Crops(above=448, most=4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"crops": {"above": 448, "most": 7}}, "512 tokens has no room for an image of 8 x 64"),
        ({"packing": {"tokens": 383}, "crops": {"above": 448, "most": 4}}, "383 tokens"),
        ({"packing": {"tokens": 127}}, "127 tokens has no room for an image of 1 x 64"),
        ({"packing": {"images": 4}, "crops": {"above": 9, "most": 4}}, "4 images .* 5 pieces"),
    ],
)
def test_a_stage_whose_images_find_no_room_is_refused(
    tmp_path: Path, words: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        load_stage(changed(tmp_path, **words))


@given(st.floats(-1, 2))
def test_weights_go_from_the_first_to_the_last(progress: float) -> None:
    first, now, last = (STAGE.weights(["count", "other"], p) for p in (0, progress, 1))
    assert last["count"] <= now["count"] <= first["count"]
    assert now["other"] == 0  # no star, so nothing for those that are not named

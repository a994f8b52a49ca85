"""A trained model's description: it serves images as the last stage has shown them."""

from __future__ import annotations

from dataclasses import asdict

from mmserve.model.spec import read_vision
from mmserve.vision.train.export import description
from tests.vision.train.tiny import CUT, DATA, STAGE


def test_a_model_is_served_with_the_crops_of_its_last_stage() -> None:
    cut = description(DATA, CUT)
    assert CUT.crops is not None and cut["vision"]["crops"] == asdict(CUT.crops)
    assert read_vision(cut["vision"]).crops == CUT.crops
    for before in (DATA, cut):
        assert "crops" not in description(before, STAGE)["vision"]

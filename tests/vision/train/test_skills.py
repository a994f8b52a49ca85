"""Every maker: the same arguments give the same example, and other ones another."""

from __future__ import annotations

import pytest

from mmserve.vision.train.assets import Assets
from mmserve.vision.train.example import Example, Split
from mmserve.vision.train.skills import SKILLS, example


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    path = tmp_path_factory.mktemp("assets") / "assets.zip"
    path.touch()
    return Assets(path)


def parts(example: Example) -> tuple[object, ...]:
    return example.skill, example.turns, tuple(image.tobytes() for image in example.images)


@pytest.mark.parametrize("skill", SKILLS)
@pytest.mark.parametrize("split", Split)
def test_an_example_is_decided_by_its_arguments(skill: str, split: Split, assets: Assets) -> None:
    first, again, other = (example(skill, split, seed=3, index=i, assets=assets) for i in (0, 0, 1))
    assert parts(first) == parts(again) != parts(other)
    assert first.skill == skill


@pytest.mark.parametrize("skill", SKILLS)
def test_held_out_examples_are_others_than_those_of_training(skill: str, assets: Assets) -> None:
    train, held = (example(skill, split, seed=3, index=0, assets=assets) for split in Split)
    assert parts(train) != parts(held)

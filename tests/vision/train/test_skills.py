"""Every maker: the same arguments give the same example, and other ones another."""

from __future__ import annotations

import pickle

import pytest

from mmserve.vision.train.assets import Assets, Split
from mmserve.vision.train.example import Example
from mmserve.vision.train.skills import LARGE, SKILLS, example, mixed

EVERY = (*SKILLS, *LARGE)
MADE = 4  # examples of a skill and split that are looked at


def made(skill: str, split: Split, index: int, assets: Assets) -> Example:
    return example(skill, split, seed=3, index=index, assets=assets)


def parts(example: Example) -> tuple[object, ...]:
    return example.skill, example.turns, tuple(image.tobytes() for image in example.images)


@pytest.mark.parametrize("skill", EVERY)
@pytest.mark.parametrize("split", Split)
def test_an_example_is_decided_by_its_arguments(skill: str, split: Split, assets: Assets) -> None:
    elsewhere: Assets = pickle.loads(pickle.dumps(assets))
    first = [parts(made(skill, split, i, assets)) for i in range(MADE)]
    again = [parts(made(skill, split, i, elsewhere)) for i in reversed(range(MADE))]
    assert first == again[::-1]
    assert len(set(first)) == MADE
    assert all(what[0] == skill for what in first)


@pytest.mark.parametrize("skill", EVERY)
def test_held_out_examples_are_others_than_those_of_training(skill: str, assets: Assets) -> None:
    train, held = (made(skill, split, 0, assets) for split in Split)
    assert parts(train) != parts(held)


@pytest.mark.parametrize("skill", EVERY)
@pytest.mark.parametrize("split", Split)
def test_every_turn_asks_something_and_answers_it(skill: str, split: Split, assets: Assets) -> None:
    for i in range(MADE):
        for turn in made(skill, split, i, assets).turns:
            assert turn.question.strip() and turn.answer.strip()
            assert all(0 <= start < end <= len(turn.answer) for start, end in turn.spelled)


def test_what_only_crops_show_is_no_part_of_all_skills() -> None:
    """A stage's mixture has `*` for those; the ones of large pictures it must name."""
    assert LARGE and not LARGE.keys() & SKILLS.keys()
    assert mixed({"*", "colour"}) == tuple(SKILLS)
    assert mixed({"*", "small_emoji"}) == (*SKILLS, "small_emoji")

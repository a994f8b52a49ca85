"""What is held out: no word, font, vendor, photograph, digit or question is in both splits."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.vision.train.assets import Assets, AssetsMissingError, Split, is_held_out
from tests.vision.train.archive import WORDS

TRAIN, HELD = Split.TRAIN, Split.HELD_OUT


def test_words_are_of_one_split_by_their_hash(assets: Assets) -> None:
    train, held = assets.words(TRAIN), assets.words(HELD)
    assert train and held
    assert sorted([*train, *held]) == sorted(WORDS)
    assert not set(train) & set(held)
    assert all(map(is_held_out, held)) and not any(map(is_held_out, train))


@given(st.text(max_size=12))
def test_a_hash_is_the_same_every_time(text: str) -> None:
    assert is_held_out(text) == is_held_out(text)


@pytest.mark.parametrize("script", ["latin", "chinese"])
def test_fonts_are_of_one_split(script: str, assets: Assets) -> None:
    train, held = (set(assets.fonts(split, script)) for split in (TRAIN, HELD))
    assert train and held and not train & held


def test_one_vendor_is_never_drawn_in_training(assets: Assets) -> None:
    assert not set(assets.vendors(TRAIN)) & set(assets.vendors(HELD))
    assert len(assets.vendors(HELD)) == 1


@pytest.mark.parametrize("digit", range(10))
def test_handwriting_and_photographs_are_of_one_split(digit: int, assets: Assets) -> None:
    for find in (lambda s: assets.digits(s, digit), assets.photos):
        train, held = ({image.tobytes() for image in find(split)} for split in (TRAIN, HELD))
        assert train and held and not train & held


def test_a_missing_archive_says_what_makes_it(tmp_path: Path) -> None:
    with pytest.raises(AssetsMissingError, match="mmserve train --fetch"):
        Assets(tmp_path / "none.zip")

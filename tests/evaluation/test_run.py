"""What a row asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmserve.evaluation.client import Api, messages
from mmserve.evaluation.rows import Row
from mmserve.evaluation.run import SEED, ask
from mmserve.vision.train.assets import Assets, Split
from mmserve.vision.train.skills import example
from tests.vision.train.archive import small_archive


class Asked(Api):
    """Says what it was asked."""

    def ask(self, messages: list[dict[str, Any]]) -> str:
        return json.dumps(messages)


def test_a_row_of_larger_pictures_asks_the_same_of_them(tmp_path: Path) -> None:
    small_archive(tmp_path / "assets.zip")
    assets, api = Assets(tmp_path / "assets.zip"), Asked("", "", "")
    made = example("colour", Split.HELD_OUT, seed=SEED, index=3, assets=assets)
    assert [image.size for image in made.images] == [(224, 224)]
    large = made.enlarged(672)
    assert [image.size for image in large.images] == [(672, 672)]
    plain, enlarged = (ask(api, Row("colour", longer=longer), 3, assets) for longer in (None, 672))
    assert plain.turn == enlarged.turn == made.turns[-1]
    assert json.loads(plain.text) == messages(made, "auto")
    assert json.loads(enlarged.text) == messages(large, "auto")

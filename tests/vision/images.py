"""Small image files for the tests, made on the spot."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """An RGB image in which every pixel differs, so that no turn or shift goes unnoticed."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def smooth(width: int, height: int) -> Image.Image:
    """An RGB image of two gradients with a red bar on top, kind to lossy formats."""
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([255 * x / width, 255 * y / height, 0 * x + 128], -1).astype(np.uint8)
    pixels[: height // 4] = (220, 20, 20)
    return Image.fromarray(pixels)


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def png_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def plain_png(width: int, height: int) -> bytes:
    """A whole 1-bit PNG of one colour, compressed row by row: cheap at any size."""
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    packer, rows = zlib.compressobj(9), bytes(1 + (width + 7) // 8) * 500
    body = b"".join(packer.compress(rows) for _ in range(height // 500)) + packer.flush()
    chunks = ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in chunks)

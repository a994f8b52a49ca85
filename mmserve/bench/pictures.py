"""Pictures to measure with: drawn, deterministic, all different.

Owns their look. Knows nothing of workloads or models.
"""

from __future__ import annotations

import io
import random

from PIL import Image, ImageDraw

SIZE = (640, 480)  # pixels; about what a client sends after its own downscaling


def draw(key: str) -> bytes:
    """A JPEG of a dozen coloured shapes on noise; equal keys give equal bytes."""
    rng = random.Random(key)
    width, height = SIZE
    coarse = Image.frombytes(
        "RGB", (width // 8, height // 8), rng.randbytes(width * height * 3 // 64)
    )
    image = coarse.resize(SIZE, Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(image)
    for _ in range(12):
        x, y = rng.randrange(width - 80), rng.randrange(height - 80)
        box = (x, y, x + rng.randrange(40, 240), y + rng.randrange(40, 240))
        colour = (rng.randrange(256), rng.randrange(256), rng.randrange(256))
        shape = rng.choice((pen.ellipse, pen.rectangle))
        shape(box, fill=colour)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=85)
    return file.getvalue()

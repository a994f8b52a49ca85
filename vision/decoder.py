"""Where image files are decoded: the face of it, and decoding in the caller's own process.

Owns the choice only; what becomes of bytes is `preprocess`'s. Knows nothing of models or requests.
"""

from __future__ import annotations

from typing import Protocol

from PIL import Image

from mmserve.config import DecodingConfig, ImageLimits
from mmserve.vision import preprocess
from mmserve.vision.decode_pool import DecodePool


class Decoder(Protocol):
    """From whole image files to pixels, as `preprocess` says. Thread-safe."""

    @property
    def limits(self) -> ImageLimits: ...
    def decode(self, data: bytes, size: int, crops: int = 0) -> preprocess.Pixels:
        """As `preprocess.decode_pieces`, whose errors it raises."""

    def decode_full(self, data: bytes) -> Image.Image:
        """As `preprocess.decode_full`, whose errors it raises."""

    def close(self) -> None:
        """Let go of what it holds; used again, it takes that anew."""


class DecodeHere:
    """In the caller's thread: for images of one's own."""

    def __init__(self, limits: ImageLimits) -> None:
        self.limits = limits

    def decode(self, data: bytes, size: int, crops: int = 0) -> preprocess.Pixels:
        return preprocess.decode_pieces(data, self.limits, size, crops)

    def decode_full(self, data: bytes) -> Image.Image:
        return preprocess.decode_full(data, self.limits)

    def close(self) -> None:
        pass


def build_decoder(limits: ImageLimits, config: DecodingConfig) -> Decoder:
    if config.processes:
        return DecodePool(limits, config.processes, config.max_seconds)
    return DecodeHere(limits)

"""Small KV files made up for tests."""

from __future__ import annotations

from typing import Any

import torch

from mmserve.kvfile.file import KVFile
from mmserve.kvfile.header import Group, Identity, KVHeader, StoredImage, TextRun

SIZE = 4  # tokens in a page
FULL = Group(layers=(0, 2), window=None, text=True, images=True, kv_heads=2, head_dim=3)
WINDOW = Group(layers=(1,), window=5, text=True, images=True, kv_heads=1, head_dim=6)


def identity(**other: Any) -> Identity:
    words: dict[str, Any] = {
        "architecture": "llama",
        "weights": "aa" * 32,
        "weights_dtype": "float32",
        "tokenizer": "bb" * 32,
        "processor": "cc" * 32,
        "vision_mode": "isolated",
        "rope": {"parameters": {"rope_theta": 10000.0}, "scaling": None},
        "page_size": SIZE,
        "dtype": "float32",
        "groups": (FULL, WINDOW),
    }
    return Identity(**{**words, **other})


def header(own: Identity | None = None) -> KVHeader:
    """A first run, two that go on from it, one with a hole in its window; two images."""
    image = b"\x01" * 32
    return KVHeader(
        own or identity(),
        runs=(
            TextRun(None, tuple(range(8)), ((3, (image, b"regime1")),), ((0, 1), (1,))),
            TextRun(0, tuple(range(4)), (), ((0,), (0,))),
            TextRun(0, tuple(range(9, 13)), ((0, (image,)),), ((0,), ())),
        ),
        images=(StoredImage(image, 6, (0, 1)), StoredImage(b"\x02" * 32, 4, (1,))),
    )


def kv_file(dtype: torch.dtype = torch.float32, own: Identity | None = None) -> KVFile:
    """Random numbers under `header`."""
    made = header(own or identity(dtype=str(dtype).removeprefix("torch.")))
    random = torch.Generator().manual_seed(1)
    shapes = made.shapes().items()
    return KVFile(made, {n: torch.randn(s, generator=random).to(dtype) for n, s in shapes})

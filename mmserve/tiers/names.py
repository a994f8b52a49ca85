"""The names of objects: equal names, equal keys and values.

Owns how names are made. No torch; knows nothing of objects' bytes.

Text goes in runs of so many whole pages, counted from the start of its sequence, so that names do
not depend on how the prefix tree was split. A run's name contains all that stands before its end,
and every name whose KV it is (`seed`).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Hashable, Sequence

RUN_PAGES = 4  # 8 MiB of a 7B model with grouped heads in bf16: one large copy, one whole file


def image_name(seed: bytes, key: bytes) -> bytes:
    """[32 bytes] of an image, by its key in the vision pool."""
    return hashlib.sha256(b"image" + seed + key).digest()


def run_names(seed: bytes, keys: Sequence[Hashable], run_tokens: int) -> list[bytes]:
    """[32 bytes] of each whole run of a sequence. `keys`: as `Sequence.keys` has them: a token id,
    or a tuple of names and a token id."""
    names, last = [], hashlib.sha256(b"text" + seed).digest()
    for start in range(0, len(keys) - run_tokens + 1, run_tokens):
        last = hashlib.sha256(last + _run(keys[start : start + run_tokens])).digest()
        names.append(last)
    return names


def _run(keys: Sequence[Hashable]) -> bytes:
    """Tokens, then what stands before them; unlike runs of one length give unlike bytes."""
    tokens: list[int] = []
    marks = []
    for index, key in enumerate(keys):
        if isinstance(key, tuple):
            *before, token = key
            marks.append(_number(index) + _number(len(before)))
            marks += [_number(len(name)) + name for name in before]
        else:
            token = key
        tokens.append(token)
    return array("q", tokens).tobytes() + b"".join(marks)


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")

"""The weight files of a checkpoint folder, looked at without loading a tensor.

Owns which safetensors files belong to a checkpoint, whether each is whole, how many bytes their
tensors take, and what identifies them. Knows nothing of models, torch or the hub.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmserve.model.fetch import ModelUnavailableError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_MAX_HEADER = 100_000_000  # bytes; safetensors' own limit
_BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_BLOB = re.compile(r"[0-9a-f]{64}")  # a large file of the hub's cache is named by its SHA-256


@dataclass(frozen=True)
class Shard:
    """One whole safetensors file. `elements`: how many numbers of each dtype (F32, BF16 ...)."""

    path: Path
    names: frozenset[str]
    elements: dict[str, int]


def find_shards(folder: Path) -> tuple[Shard, ...]:
    """Every weight file of a checkpoint, each of them present and whole.

    Raises `ModelUnavailableError`, naming the first file that is not.
    """
    index = folder / INDEX
    if index.is_file():
        return _indexed(index)
    if (folder / SINGLE).is_file():
        return (read_shard(folder / SINGLE),)
    pickled = sorted(p.name for p in folder.glob("*.bin"))
    has = f"only {pickled[0]} (pickled weights are not loaded)" if pickled else "neither"
    raise ModelUnavailableError(f"{folder} should hold {SINGLE} or {INDEX}; it has {has}")


def read_shard(path: Path) -> Shard:
    """A file's header, checked: file size = 8 + header + the end of the last tensor's data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER, size - 8):
            raise ModelUnavailableError(
                f"{path} is no whole safetensors file: its {size} bytes end in the header"
            )
        raw = file.read(length)
    try:
        tensors: dict[str, Any] = json.loads(raw)
        tensors.pop("__metadata__", None)
        end = max((t["data_offsets"][1] for t in tensors.values()), default=0)
        elements: Counter[str] = Counter()
        for tensor in tensors.values():
            begin, stop = tensor["data_offsets"]
            elements[tensor["dtype"]] += (stop - begin) * 8 // bits(tensor["dtype"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelUnavailableError(
            f"{path} is no safetensors file: its header cannot be read"
        ) from error
    if size != 8 + length + end:
        raise ModelUnavailableError(
            f"{path} is not whole: it has {size} bytes, its header speaks of {8 + length + end}"
        )
    return Shard(path, frozenset(tensors), dict(elements))


def bits(dtype: str) -> int:
    """Of one number of a safetensors dtype; `BF16`, `F8_E4M3` and the like say it themselves."""
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.match(r"[A-Z]+(\d+)", dtype)
    if found is None:
        raise ValueError(f"unknown dtype {dtype!r}")
    return int(found[1])


def bytes_in_memory(shards: Sequence[Shard], float_bytes: int) -> int:
    """Of all tensors when floating-point ones take `float_bytes` a number, others their own."""
    total = 0
    for shard in shards:
        for dtype, count in shard.elements.items():
            total += count * float_bytes if "F" in dtype else count * bits(dtype) // 8
    return total


def identify(paths: Sequence[Path]) -> list[tuple[str, bytes]]:
    """(name, what stands for the content) of each weight file, without reading gigabytes.

    In the hub's cache a large file is a link to a blob named by its SHA-256, which the download
    has made sure of: that hash is the content's. Any other file is known by its first 64 KiB (the
    header: names, shapes, offsets), its size and its time of change. So a copied or touched folder
    counts as other weights, which costs a recomputation; reading all of a file to hash it would
    cost every start 15 s for 15 GB.
    """
    found = []
    for path in paths:
        real = path.resolve()
        if path.is_symlink() and real.parent.name == "blobs" and _BLOB.fullmatch(real.name):
            found.append((path.name, bytes.fromhex(real.name)))
            continue
        stat = path.stat()
        with path.open("rb") as file:
            head = hashlib.sha256(file.read(1 << 16)).hexdigest()
        found.append((path.name, f"{head} {stat.st_size} {stat.st_mtime_ns}".encode()))
    return found


def _indexed(index: Path) -> tuple[Shard, ...]:
    try:
        placed: dict[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
        files = sorted(set(placed.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelUnavailableError(f"{index} cannot be read: {error!r}") from error
    missing = [name for name in files if not (index.parent / name).is_file()]
    if missing:
        raise ModelUnavailableError(
            f"{index.parent} lacks {missing[0]}: {len(missing)} of {len(files)} weight files that "
            f"{INDEX} lists are missing"
        )
    shards = tuple(read_shard(index.parent / name) for name in files)
    absent = sorted(set(placed) - frozenset().union(*(s.names for s in shards)))
    if absent:
        raise ModelUnavailableError(
            f"{index.parent} is not whole: tensor {absent[0]} is listed in {INDEX} for "
            f"{placed[absent[0]]} and is in no file"
        )
    return shards

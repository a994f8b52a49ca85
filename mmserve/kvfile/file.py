"""A KV file on disk: tensors and their header in one safetensors file, checked when read.

Owns checksums and that a file is there whole or not at all. Knows nothing of pools or engines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mmserve.kvfile.header import Identity, KVFileError, KVHeader, Shape
from mmserve.whole_file import replacing

HEADER, HEADER_SUM = "kv_header", "kv_header_sha256"  # in the safetensors metadata


@dataclass(frozen=True)
class KVFile:
    """`tensors`: on the CPU, by the names of `KVHeader.shapes`."""

    header: KVHeader
    tensors: Mapping[str, Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def checksum(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes in C order, little-endian as stored."""
    flat = tensor.contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()


def write_file(path: Path, file: KVFile) -> KVHeader:
    """Writes beside `path` first, so that a file of this name is whole at any time.

    Returns the header as written. Raises `OSError`, or `KVFileError` with what safetensors says.
    """
    tensors = {name: tensor.contiguous() for name, tensor in file.tensors.items()}
    assert {n: tuple(t.shape) for n, t in tensors.items()} == file.header.shapes()
    header = replace(file.header, checksums={n: checksum(t) for n, t in tensors.items()})
    text = header.to_json()
    metadata = {HEADER: text, HEADER_SUM: hashlib.sha256(text.encode()).hexdigest()}
    with replacing(path) as temporary:
        try:
            save_file(tensors, temporary, metadata)
        except SafetensorError as error:
            raise KVFileError(f"{path} cannot be written: {error}") from error
    return header


def read_file(path: Path, ours: Identity | None = None, compatible: Collection[str] = ()) -> KVFile:
    """The whole file, every checksum compared.

    `ours`, `compatible`: whose KV it has to be (`Identity.require`), asked before the payload is
    read. Raises `KVFileError` (a
    `KVMismatchError` where it is somebody else's) or `OSError`.
    """
    try:
        with safe_open(path, "pt") as opened:
            header = _header(opened.metadata() or {})
            if ours is not None:
                ours.require(header.identity, compatible)
            shapes = header.shapes()
            if odd := sorted(set(opened.keys()) ^ set(shapes)):
                raise KVFileError(f"tensor {odd[0]} is in the header or in the payload alone")
            if odd := sorted(set(header.checksums) ^ set(shapes)):
                raise KVFileError(f"tensor {odd[0]} has no checksum, or is none")
            tensors = {name: opened.get_tensor(name) for name in shapes}
        dtypes = header.dtypes()
        for name, tensor in tensors.items():
            _check(name, tensor, shapes[name], dtypes[name])
            if checksum(tensor) != header.checksums[name]:
                raise KVFileError(f"tensor {name} is damaged: its checksum is another")
    except KVFileError as error:
        error.args = (f"{path}: {error}",)
        raise
    except SafetensorError as error:
        raise KVFileError(f"{path} is no whole safetensors file: {error}") from error
    return KVFile(header, tensors)


def _header(metadata: Mapping[str, str]) -> KVHeader:
    if HEADER not in metadata or HEADER_SUM not in metadata:
        raise KVFileError(f"the metadata lacks {HEADER} or {HEADER_SUM}: this is no KV file")
    text = metadata[HEADER]
    if hashlib.sha256(text.encode()).hexdigest() != metadata[HEADER_SUM]:
        raise KVFileError("the header is damaged: its checksum is another")
    return KVHeader.from_json(text)


def _check(name: str, tensor: Tensor, shape: Shape, wanted: str) -> None:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tuple(tensor.shape) != shape or dtype != wanted:
        raise KVFileError(
            f"tensor {name} is {dtype} {list(tensor.shape)}; the header says {wanted} {list(shape)}"
        )

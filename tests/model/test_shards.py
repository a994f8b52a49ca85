"""Weight files looked at without loading: whole or refused in one sentence, counted, identified."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mmserve.model.fetch import ModelUnavailableError
from mmserve.model.shards import bytes_in_memory, find_shards, identify, read_shard

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    tensors = {
        "a": torch.zeros(3, 5, dtype=torch.bfloat16),
        "b": torch.zeros(7),
        "n": torch.zeros(2, dtype=torch.int64),
        "empty": torch.zeros(0),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"a": torch.zeros(4)}, tmp_path / FIRST)
    save_file({"b": torch.zeros(4)}, tmp_path / SECOND)
    index = {"weight_map": {"a": FIRST, "b": SECOND}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def complaint(folder: Path) -> str:
    with pytest.raises(ModelUnavailableError) as refused:
        find_shards(folder)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_file_s_numbers_are_counted_by_dtype(single: Path) -> None:
    (shard,) = find_shards(single)
    assert shard.elements == {"BF16": 15, "F32": 7, "I64": 2}
    assert shard.names == {"a", "b", "n", "empty"}
    assert bytes_in_memory([shard], 4) == (15 + 7) * 4 + 2 * 8
    assert bytes_in_memory([shard], 2) == (15 + 7) * 2 + 2 * 8


def test_all_files_of_the_index_are_found(sharded: Path) -> None:
    assert [shard.path.name for shard in find_shards(sharded)] == [FIRST, SECOND]


def test_a_missing_file_of_the_index_is_named(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    said = complaint(sharded)
    assert SECOND in said
    assert "1 of 2 weight files" in said


@pytest.mark.parametrize("left", [0, 5, 40, -1])
def test_a_file_that_was_cut_is_refused_with_its_sizes(single: Path, left: int) -> None:
    path = single / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, left if left >= 0 else size - 1)
    said = complaint(single)
    assert str(path) in said
    assert str(path.stat().st_size) in said


def test_a_file_with_bytes_too_many_is_refused(single: Path) -> None:
    with (single / "model.safetensors").open("ab") as file:
        file.write(b"x")
    assert "is not whole" in complaint(single)


@pytest.mark.parametrize("header", [b"no JSON", b"[]", b'{"a": {}}', b'{"a": 3}', b"\xff\xfe"])
def test_a_header_that_is_none_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelUnavailableError, match="header cannot be read"):
        read_shard(path)


def test_a_git_lfs_pointer_is_no_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "no whole safetensors file" in complaint(tmp_path)


def test_a_tensor_that_no_file_holds_is_named(sharded: Path) -> None:
    index = {"weight_map": {"a": FIRST, "b": SECOND, "c": SECOND}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "tensor c" in complaint(sharded)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_broken_index_is_refused(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json cannot be read" in complaint(sharded)


def test_pickled_weights_are_not_loaded(tmp_path: Path) -> None:
    assert "it has neither" in complaint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "pickled weights are not loaded" in complaint(tmp_path)


def test_a_changed_or_touched_file_has_another_identity(single: Path) -> None:
    path = single / "model.safetensors"
    before = identify([path])
    assert identify([path]) == before
    os.utime(path, (1, 1))
    assert identify([path]) != before


def test_a_blob_of_the_hub_s_cache_is_known_by_its_hash(tmp_path: Path) -> None:
    name = "ab" * 32
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    save_file({"a": torch.zeros(4)}, blobs / name)
    link = tmp_path / "model.safetensors"
    link.symlink_to(blobs / name)
    assert identify([link]) == [("model.safetensors", bytes.fromhex(name))]
    os.utime(blobs / name, (1, 1))
    assert identify([link]) == [("model.safetensors", bytes.fromhex(name))]

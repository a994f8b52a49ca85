"""Files: the same bits come back, and whatever is not whole is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from mmserve.kvfile.file import HEADER, KVFile, read_file, write_file
from mmserve.kvfile.header import KVFileError, KVMismatchError
from tests.kvfile.files import identity, kv_file


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kv") / "whole.kv"
    write_file(path, kv_file())
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_bits_come_back(dtype: torch.dtype, tmp_path: Path) -> None:
    made = kv_file(dtype)
    path = tmp_path / "a.kv"
    header = write_file(path, made)
    found = read_file(path, made.header.identity)
    assert found.header == header
    assert (found.header.runs, found.header.images) == (made.header.runs, made.header.images)
    assert found.tensors.keys() == made.tensors.keys()
    for name, tensor in made.tensors.items():
        assert found.tensors[name].dtype == dtype and torch.equal(found.tensors[name], tensor)


def test_any_reader_of_safetensors_sees_header_and_tensors(written: Path) -> None:
    with safe_open(written, "np") as file:
        assert '"format":"mmserve-kv"' in file.metadata()[HEADER]
        assert file.get_tensor("text.0.0").shape == (2, 2, 2, 2, 4, 3)
        assert file.get_tensor("image.1.1").shape == (1, 2, 1, 1, 4, 6)


def test_every_cut_length_is_refused(written: Path, tmp_path: Path) -> None:
    whole = written.read_bytes()
    path = tmp_path / "cut.kv"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(KVFileError, match=r"cut\.kv"):
            read_file(path)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_every_flipped_bit_is_refused(written: Path, data: st.DataObject) -> None:
    whole = bytearray(written.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1), "byte")
    whole[at] ^= 1 << data.draw(st.integers(0, 7), "bit")
    path = written.with_name("flipped.kv")
    path.write_bytes(whole)
    with pytest.raises(KVFileError, match=r"flipped\.kv"):
        read_file(path)


def test_every_byte_of_the_payload_is_covered(written: Path) -> None:
    whole = written.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    path = written.with_name("payload.kv")
    for at in range(start, len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(KVFileError, match=r"tensor \w+\.\d\.\d is damaged"):
            read_file(path)


def test_a_file_of_another_model_is_refused_by_name(written: Path) -> None:
    with pytest.raises(KVMismatchError, match=r"whole\.kv: weights differs: here 'ee") as refused:
        read_file(written, identity(weights="ee" * 32))
    assert refused.value.field == "weights"


def test_weights_are_no_kv_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(3)}, path)
    with pytest.raises(KVFileError, match="this is no KV file"):
        read_file(path)


def test_a_tensor_of_another_dtype_than_the_header_says_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    write_file(path, kv_file(torch.float16, identity(dtype="float32")))
    with pytest.raises(KVFileError, match="is float16 .* the header says float32"):
        read_file(path)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.kv"
    path.write_bytes(b"old")

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("mmserve.kvfile.file.save_file", full)
    with pytest.raises(OSError, match="no space"):
        write_file(path, kv_file())
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_file_of_nothing_is_a_file(tmp_path: Path) -> None:
    empty = kv_file().header
    path = tmp_path / "empty.kv"
    write_file(path, KVFile(type(empty)(empty.identity), {}))
    assert read_file(path).tensors == {}

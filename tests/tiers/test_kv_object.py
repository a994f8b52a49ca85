"""An object as a file: what goes in comes out, and nothing else passes for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from mmserve.kvfile.header import KVFileError, KVMismatchError
from mmserve.tiers.disk import from_bytes
from mmserve.tiers.kv_object import ALIGNMENT, Owner, header_of
from tests.tiers.objects import OWNER, item

NAME = bytes(range(32))


def whole(owner: Owner = OWNER, name: bytes = NAME) -> bytes:
    made = item(name)
    return header_of(owner, made) + made.memory.numpy().tobytes()


def test_what_was_written_is_read() -> None:
    made = item(NAME)
    read = from_bytes(OWNER, NAME, whole(), pinned=False)
    assert read.parts == made.parts and torch.equal(read.memory, made.memory)


def test_the_file_is_one_that_safetensors_reads() -> None:
    made = item(NAME)
    tensors = load(whole())
    views = {f"group.{g}": view for g, _, view in OWNER.views(made.parts, made.memory)}
    assert tensors.keys() == views.keys()
    for name, view in views.items():
        assert tensors[name].shape == view.shape
        assert torch.equal(tensors[name].view(torch.uint8), view.view(torch.uint8))
    assert len(header_of(OWNER, made)) % ALIGNMENT == 0


@given(place=st.integers(0, len(whole()) - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_is_refused(place: int, bit: int) -> None:
    data = bytearray(whole())
    data[place] ^= 1 << bit
    with pytest.raises(KVFileError):
        from_bytes(OWNER, NAME, bytes(data), pinned=False)


@given(length=st.integers(0, len(whole()) - 1))
def test_any_cut_file_is_refused(length: int) -> None:
    with pytest.raises(KVFileError):
        from_bytes(OWNER, NAME, whole()[:length], pinned=False)


def test_another_model_s_object_is_refused_by_the_word_that_differs() -> None:
    other = Owner(replace(OWNER.identity, weights="ff"))
    with pytest.raises(KVMismatchError) as refused:
        from_bytes(OWNER, NAME, whole(other), pinned=False)
    assert refused.value.field == "weights"
    assert other.seed != OWNER.seed


def test_who_takes_other_weights_kv_has_objects_of_its_own() -> None:
    near = [Owner(OWNER.identity, of) for of in ((), ("ff",), ("ff", "ee"), ("ee", "ff"))]
    assert near[0].seed == OWNER.seed != near[1].seed != near[2].seed == near[3].seed


def test_an_object_under_another_name_is_refused() -> None:
    with pytest.raises(KVFileError):
        from_bytes(OWNER, bytes(32), whole(), pinned=False)

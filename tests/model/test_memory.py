"""Free memory read from the system, and a refusal with the numbers in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmserve.model import memory
from mmserve.model.fetch import ModelUnavailableError

CPU = torch.device("cpu")


def test_what_fits_is_not_refused() -> None:
    memory.require("m", {"weights": 10, "KV pools": 5}, CPU, 15)
    memory.require("m", {"weights": 10**15}, CPU, None)  # the system does not say


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ModelUnavailableError) as refused:
        memory.require("m", {"weights in float32": 15 * 10**9, "KV pools": 10**9}, CPU, 8 * 10**9)
    assert str(refused.value) == (
        "m does not fit into memory: it needs 15.00 GB of weights in float32 + 1.00 GB of KV pools,"
        " and 8.00 GB are free on cpu"
    )


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    return tmp_path


def limit(system: Path, bytes_: str) -> None:
    (system / "memory.max").write_text(f"{bytes_}\n")
    (system / "memory.current").write_text("1000000\n")
    (system / "memory.stat").write_text("anon 7\ninactive_file 300000\nactive_file 100000\n")


def test_the_system_s_available_memory_counts(system: Path) -> None:
    assert memory.free_bytes(CPU) == 4000 * 1024


def test_a_container_s_own_limit_counts_and_its_page_cache_does_not(system: Path) -> None:
    limit(system, "2000000")
    assert memory.free_bytes(CPU) == 2_000_000 - 1_000_000 + 400_000
    limit(system, "max")
    assert memory.free_bytes(CPU) == 4000 * 1024


def test_a_system_that_says_nothing_is_not_guessed_at(system: Path) -> None:
    (system / "meminfo").unlink()
    assert memory.free_bytes(CPU) is None

"""Memory that is had ready: as much as was asked for, and no more than there is."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from mmserve.tiers import host_memory
from mmserve.tiers.host_memory import Reserve, bytes_taken


class Pins:
    """Memory that is pinned: how much is held. From `most` pieces on there is none."""

    def __init__(self, most: int = 100) -> None:
        self.sizes: list[int] = []
        self.reached = threading.Event()
        self._most = most

    def __call__(self, num_bytes: int, *, pinned: bool) -> Tensor:
        assert pinned
        if len(self.sizes) == self._most:
            raise RuntimeError("out of memory")
        self.sizes.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)


def test_whole_pieces_within_the_bytes_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "host_memory", pins := Pins())
    reserve = Reserve(350, 100)
    reserve._thread.join()
    assert pins.sizes == [100, 100, 100]
    reserve.close()


def test_where_there_is_no_more_memory_it_ends_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_memory, "host_memory", Pins(most=3))
    Reserve(100 << 20, 1 << 20)._thread.join()
    assert "no more than 3 MiB could be pinned" in caplog.text


def test_what_is_not_pinned_takes_its_bytes() -> None:
    assert bytes_taken(torch.empty(1000, dtype=torch.uint8)) == 1000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_what_was_pinned_ahead_is_what_is_then_taken() -> None:
    torch.cuda.current_device()  # before a first use there are no figures
    size = 3 << 20
    Reserve(4 * size, size)._thread.join()
    before = torch.cuda.host_memory_stats()["num_host_alloc"]
    held = [host_memory.host_memory(size, pinned=True) for _ in range(3)]
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == before
    assert all(bytes_taken(memory) == 4 << 20 for memory in held)

"""Tiers where memory or time is short: what is not kept is computed again, and nobody fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmserve.engine import kv_tiers
from mmserve.engine.kv_objects import KVObjects
from mmserve.engine.kv_tiers import KVTiers
from mmserve.request import FinishReason
from tests.engine.driver import words
from tests.engine.test_tiers import disk, driver, flood, found, refusals, settle, talk, tiers
from tests.engine.tiny import tiny_model


def no_memory(*_: Any, **__: Any) -> Any:
    raise RuntimeError("out of memory")


def test_what_finds_no_memory_on_its_way_up_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    d = driver(tiny_model(), vision_pages=4)
    expected = talk(d)
    flood(d)
    with monkeypatch.context() as patch:
        patch.setattr(KVObjects, "write", no_memory)
        assert talk(d) == expected and found(d) == (0, 0, 2)
        assert d.last(str(len(d.events) - 1)).finish_reason is FinishReason.LENGTH
    d.assert_idle()
    flood(d)
    assert talk(d) == expected and found(d)[2] == 0


def test_ended_requests_wait_for_their_copies_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_tiers, "MOST_LEFT", 2)
    monkeypatch.setattr(KVTiers, "tick", lambda self, busy: None)
    d = driver(tiny_model(), disk(tmp_path))
    for seed in range(4):
        d.submit((words(seed, 100),))
        while d.engine.scheduler.has_work:
            d.step()
    assert len(tiers(d)._left) == 2 and refusals(d) == {"queue_full": 2}
    monkeypatch.undo()
    settle(d)
    assert not tiers(d)._left

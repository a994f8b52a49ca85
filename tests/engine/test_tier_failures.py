"""Tiers that fail, or lack memory or time: what is not kept is computed again, and nobody fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmserve.config import TierConfig
from mmserve.engine import kv_tiers
from mmserve.engine.kv_objects import KVObjects
from mmserve.engine.kv_tiers import KVTiers
from mmserve.faults import Faults
from mmserve.request import FinishReason
from tests.engine.driver import picture, words
from tests.engine.test_tiers import HOST, disk, driver, flood, found, refusals, settle, talk, tiers
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


@pytest.mark.parametrize(
    ("fault", "reason"), [("tier.write=disk_full", "unwritable"), ("tier.read=gone", "unreadable")]
)
def test_a_store_that_is_gone_costs_work_and_no_answer(
    tmp_path: Path, fault: str, reason: str
) -> None:
    d = driver(tiny_model(), disk(tmp_path), Faults(f"{fault}*1000"))
    expected = talk(d)
    settle(d)
    flood(d)
    assert talk(d) == expected and found(d) == (0, 0, 2)
    settle(d)
    assert refusals(d).keys() == {reason}
    d.assert_idle()


def test_sessions_that_together_exceed_the_pool_take_turns_and_all_get_on() -> None:
    """B18: with a tier, loads that have ended must be noticed whoever heads the queue."""
    answers = []
    for tiers_below in (HOST, TierConfig()):
        d = driver(tiny_model(), tiers_below, text_pages=20, vision_pages=8)
        for turn in range(1, 4):
            for session in range(4):
                d.submit((d.image(picture(session)), words(session, 50 * turn)))
            d.run()
        answers.append([d.tokens(str(n)) for n in range(12)])
        d.assert_idle()
    assert answers[0] == answers[1]

"""What requests wait for, what comes meanwhile, and how fast the rest is written behind."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from mmserve.engine import kv_tiers
from mmserve.engine.kv_tiers import KVTiers
from mmserve.request import FinishReason
from mmserve.tiers import stack
from mmserve.tiers.disk import Folder
from mmserve.tiers.kv_object import KVObject
from mmserve.tiers.stack import Fetch, TierStack
from tests.engine.driver import Driver, words
from tests.engine.test_tiers import A, B, disk, driver, found, refusals, settle, talk, tiers
from tests.engine.tiny import tiny_model


class Held:
    """A folder whose reads wait until they are let go."""

    def __init__(self, d: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        read = Folder.read
        monkeypatch.setattr(Folder, "read", lambda *args: (self.gate.wait(), read(*args))[1])


def test_others_go_on_while_one_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = driver(tiny_model(), disk(tmp_path))
    expected = talk(source)
    settle(source)
    d = driver(tiny_model(), disk(tmp_path))
    tiers(d)._clock = lambda: 0.0
    held = Held(d, monkeypatch)
    late = d.submit((words(1, 150), d.image(A), words(2, 70), d.image(B), words(3, 30)))
    other = d.submit((words(9, 20),))
    while not d.events[other] or d.events[other][-1].finish_reason is None:
        d.step()
    assert not d.tokens(late)
    held.gate.set()
    d.run()
    assert d.tokens(late) == expected and d.counts() == (0, 0, 0)
    d.assert_idle()


def test_the_pools_take_what_has_come_while_the_rest_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_tiers, "AHEAD", 2)
    source = driver(tiny_model(), disk(tmp_path))
    expected = source.ask(words(1, 64 * 6 + 5))
    settle(source)
    d = driver(tiny_model(), disk(tmp_path))
    tiers(d)._clock = lambda: 0.0
    last: list[bytes] = []
    gate, read, fetch = threading.Event(), Folder.read, TierStack.fetch

    def note(stack: TierStack, names: list[bytes]) -> Fetch:
        last.append(names[-1])
        return fetch(stack, names)

    def hold(folder: Folder, name: bytes) -> KVObject:
        if name in last:
            gate.wait()
        return read(folder, name)

    monkeypatch.setattr(TierStack, "fetch", note)
    monkeypatch.setattr(Folder, "read", hold)
    request = d.submit((words(1, 64 * 6 + 5),))
    (waiting,) = tiers(d)._waiting.values()
    while waiting.fetch.num_ended < 5:
        waiting.fetch.wait(0.01)
    d.step()
    assert tiers(d).lifter.lifted.text_tokens == 64 * 5 and not d.tokens(request)
    assert waiting.fetch._reads.keys() == set(last), "what is in the pools is held on the host"
    gate.set()
    d.run()
    assert d.tokens(request) == expected and found(d)[0] == 64 * 6
    assert tiers(d).lifter.lifted.text_tokens == 64 * 6
    d.assert_idle()


def test_who_waits_too_long_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = driver(tiny_model(), disk(tmp_path))
    expected = talk(source)
    settle(source)
    d = driver(tiny_model(), disk(tmp_path))
    now = [0.0]
    tiers(d)._clock = lambda: now[0]
    held = Held(d, monkeypatch)
    request = d.submit((words(1, 150), d.image(A), words(2, 70), d.image(B), words(3, 30)))
    d.step()
    assert not d.tokens(request)
    now[0] = 11.0
    d.run()
    assert d.tokens(request) == expected and d.counts()[0] == 2
    held.gate.set()
    d.assert_idle()


def test_an_abort_while_it_waits_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = driver(tiny_model(), disk(tmp_path))
    talk(source)
    settle(source)
    d = driver(tiny_model(), disk(tmp_path))
    held = Held(d, monkeypatch)
    request = d.submit((words(1, 150), d.image(A), words(2, 30)))
    d.step()
    d.abort(request)
    assert not tiers(d)._waiting and not tiers(d).lifter._fetched
    held.gate.set()
    d.run()
    assert d.last(request).finish_reason is FinishReason.ABORT
    d.assert_idle()
    settle(d)


def test_an_idle_engine_goes_on_writing_until_all_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "QUEUE_BYTES", 1)  # the writer is behind with every object
    d = driver(tiny_model(), disk(tmp_path))
    talk(d)
    assert not d.engine.has_work
    assert settle(d).used("disk")[0] == 6 and not refusals(d)


def test_a_busy_engine_writes_so_many_bytes_behind_in_so_many_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = driver(tiny_model(), disk(tmp_path))
    size = tiers(d).lifter.run_bytes
    monkeypatch.setattr(kv_tiers, "COPY_BYTES", 2 * size)
    monkeypatch.setattr(kv_tiers, "BUSY_BYTES", size // 2)
    monkeypatch.setattr(KVTiers, "has_work", False)  # what is left waits for the next steps
    d.ask(words(1, 64 * 7 + 1))
    tiers(d)._credit = 0
    tiers(d).stack.settle()
    before = tiers(d).stack.used("disk")[0]
    for _ in range(8):
        tiers(d).tick(busy=True)
    tiers(d).stack.settle()
    assert tiers(d).stack.used("disk")[0] - before == 4

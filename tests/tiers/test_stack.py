"""Tiers one under another: what falls out of one is in the next, and comes back whole."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mmserve.kvfile.header import KVFileError
from mmserve.tiers import disk, object_store, stack
from mmserve.tiers.disk import Folder
from mmserve.tiers.object_store import ObjectStore, ObjectStoreError, StoredObjectError
from mmserve.tiers.stack import TierStack
from tests.tiers.objects import OWNER, Heard, item

NAMES = [bytes([n]) * 32 for n in range(1, 6)]
SIZE = item(NAMES[0]).num_bytes
FILE = SIZE + 4096


def build(tmp_path: Path, *, host: int = 0, files: int = 0, store: bool = False) -> TierStack:
    """Budgets in objects."""
    bucket = tmp_path / "bucket"
    bucket.mkdir(exist_ok=True)
    return TierStack(
        OWNER,
        Heard(),
        host_bytes=host * SIZE,
        disk_bytes=files * FILE,
        folder=Folder(tmp_path / "kv", OWNER, pinned=False) if files else None,
        store=ObjectStore(bucket.as_uri()) if store else None,
    )


def heard(tiers: TierStack) -> Any:
    return tiers._watch


def put(tiers: TierStack, *names: bytes) -> None:
    for name in names:
        tiers.put(item(name))
        tiers.settle()
        tiers.check_invariants()


def bring(tiers: TierStack, name: bytes) -> Any:
    fetch = tiers.fetch([name])
    fetch.wait(60)
    assert fetch.finished
    return fetch.got(name)


def test_what_is_used_longest_ago_sinks_from_tier_to_tier(tmp_path: Path) -> None:
    tiers = build(tmp_path, host=1, files=2, store=True)
    put(tiers, *NAMES[:4])
    assert [tiers.where(name) for name in NAMES] == [
        "object_store",
        "object_store",
        "disk",
        "host",  # and on disk
        None,
    ]
    for name in NAMES[:4]:
        found = bring(tiers, name)
        assert torch.equal(found.memory, item(name).memory)
        tiers.settle()
        tiers.check_invariants()
    assert bring(tiers, NAMES[4]) is None
    assert not heard(tiers).refusals
    assert heard(tiers).bytes["object_store", "up"] >= SIZE


def test_without_a_tier_below_it_what_falls_out_is_gone(tmp_path: Path) -> None:
    tiers = build(tmp_path, host=2)
    put(tiers, *NAMES[:2])
    assert tiers.get(NAMES[0]) is not None  # used, so the other one goes
    put(tiers, NAMES[2])
    assert [tiers.where(name) for name in NAMES[:3]] == ["host", None, "host"]
    assert not tiers.goes_deep


def test_what_is_written_behind_stays_in_host_memory_and_outlives_the_process(
    tmp_path: Path,
) -> None:
    tiers = build(tmp_path, host=2, files=2)
    put(tiers, NAMES[0])
    assert tiers.where(NAMES[0]) == "host" and tiers.lies_deep(NAMES[0])
    again = build(tmp_path, files=2)
    assert again.where(NAMES[0]) == "disk"
    assert torch.equal(bring(again, NAMES[0]).memory, item(NAMES[0]).memory)


def test_a_start_knows_the_order_of_use_and_keeps_to_a_smaller_budget(tmp_path: Path) -> None:
    tiers = build(tmp_path, files=3)
    put(tiers, *NAMES[:3])
    for age, name in enumerate((NAMES[1], NAMES[2], NAMES[0])):
        os.utime(tmp_path / "kv" / disk.file_name(name), (age, age))
    (tmp_path / "kv" / ".x.part").write_bytes(b"half")
    (tmp_path / "kv" / "notes.txt").write_bytes(b"not ours")
    again = build(tmp_path, files=2)
    assert [again.where(name) for name in NAMES[:3]] == ["disk", None, "disk"]
    assert {file.name for file in (tmp_path / "kv").iterdir()} == {
        "notes.txt",
        disk.file_name(NAMES[0]),
        disk.file_name(NAMES[2]),
    }


def test_a_damaged_file_is_deleted_and_counted_once(tmp_path: Path) -> None:
    tiers = build(tmp_path, files=2)
    put(tiers, NAMES[0])
    file = tmp_path / "kv" / disk.file_name(NAMES[0])
    file.write_bytes(file.read_bytes()[:-1])
    for _ in range(2):
        assert bring(tiers, NAMES[0]) is None
    assert heard(tiers).refusals == {"damaged": 1}
    assert not file.exists() and tiers.where(NAMES[0]) is None
    put(tiers, NAMES[0])
    assert bring(tiers, NAMES[0]) is not None


def test_a_file_that_somebody_deleted_is_a_miss(tmp_path: Path) -> None:
    tiers = build(tmp_path, files=2)
    put(tiers, NAMES[0])
    (tmp_path / "kv" / disk.file_name(NAMES[0])).unlink()
    assert bring(tiers, NAMES[0]) is None and heard(tiers).refusals == {"unreadable": 1}
    tiers.check_invariants()


def test_a_damaged_object_of_the_store_is_deleted_there(tmp_path: Path) -> None:
    tiers = build(tmp_path, store=True)
    put(tiers, NAMES[0])
    (file,) = (tmp_path / "bucket").iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert bring(tiers, NAMES[0]) is None and heard(tiers).refusals == {"damaged": 1}
    assert not list((tmp_path / "bucket").iterdir())


def test_a_store_that_fails_for_a_while_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = build(tmp_path, store=True)
    put(tiers, NAMES[0])

    def fail(*_: object) -> None:
        raise StoredObjectError("the network is down")

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "read", fail)
        assert bring(tiers, NAMES[0]) is None
    assert heard(tiers).refusals == {"unreadable": 1} and tiers.where(NAMES[0]) is None
    again = build(tmp_path, store=True)
    put(again, NAMES[1])  # the writer has listed the store then
    assert torch.equal(bring(again, NAMES[0]).memory, item(NAMES[0]).memory)


def test_a_file_that_sinks_while_it_is_read_is_found_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = build(tmp_path, files=1, store=True)
    put(tiers, NAMES[0])

    def gone(*_: object) -> None:
        put(tiers, NAMES[1])  # for want of room the file goes down
        raise FileNotFoundError

    monkeypatch.setattr(Folder, "read", gone)
    assert torch.equal(bring(tiers, NAMES[0]).memory, item(NAMES[0]).memory)


def test_a_folder_that_became_read_only_is_no_book_of_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = build(tmp_path, files=1)
    put(tiers, NAMES[0])

    def fail(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    for name in ("write", "delete"):
        monkeypatch.setattr(Folder, name, fail)
    put(tiers, NAMES[1])
    assert tiers.where(NAMES[1]) is None and tiers.used("disk") == (0, 0)
    assert heard(tiers).refusals == {"unwritable": 1}


def test_a_full_disk_loses_objects_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = build(tmp_path, files=2)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "write", full)
        put(tiers, NAMES[0])
    assert tiers.where(NAMES[0]) is None and heard(tiers).refusals == {"unwritable": 1}
    put(tiers, NAMES[0])
    assert tiers.where(NAMES[0]) == "disk"


def test_what_the_writer_has_no_time_for_is_gone_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "QUEUE_BYTES", 0)
    tiers = build(tmp_path, files=2)
    put(tiers, NAMES[0])
    assert tiers.where(NAMES[0]) is None and heard(tiers).refusals == {"queue_full": 1}


def test_what_is_queued_when_it_closes_is_written(tmp_path: Path) -> None:
    tiers = build(tmp_path, files=3)
    for name in NAMES[:3]:
        tiers.put(item(name))
    tiers.close(60)
    assert [build(tmp_path, files=3).where(name) for name in NAMES[:3]] == ["disk"] * 3


def test_a_cancelled_fetch_gives_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = build(tmp_path, files=5)
    put(tiers, *NAMES)

    def fail(*_: object) -> None:
        raise KVFileError("no")

    monkeypatch.setattr(Folder, "read", fail)
    fetch = tiers.fetch(NAMES)
    fetch.cancel()
    fetch.wait(60)
    assert all(fetch.got(name) is None for name in NAMES)


def test_files_of_others_stand_beside_ours_in_a_folder_and_in_a_store(tmp_path: Path) -> None:
    tiers = build(tmp_path, files=1, store=True)
    put(tiers, *NAMES[:2])
    tiers.close(60)
    for folder in ("kv", "bucket"):
        (tmp_path / folder / "theirs.kv").write_bytes(b"not ours")
    again = build(tmp_path, files=1, store=True)
    again.close(60)  # what is in the store is listed by then
    assert [again.where(name) for name in NAMES[:3]] == ["object_store", "disk", None]
    assert (tmp_path / "kv" / "theirs.kv").exists() and (tmp_path / "bucket" / "theirs.kv").exists()


@pytest.mark.parametrize("url", ["nonsense", "what://is/this"])
def test_a_store_that_cannot_be_is_refused_by_its_url(url: str) -> None:
    with pytest.raises(ObjectStoreError, match=url):
        ObjectStore(url)


def test_a_store_without_the_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ObjectStoreError, match=r"mmserve\[tiers\]"):
        object_store.ObjectStore("memory:///")


def test_what_is_not_to_outlive_the_process_never_leaves_host_memory(tmp_path: Path) -> None:
    tiers = build(tmp_path, host=1, files=2, store=True)
    for name in NAMES[:2]:
        tiers.put(item(name, durable=False))
    tiers.settle()
    assert [tiers.where(name) for name in NAMES[:2]] == [None, "host"]
    put(tiers, NAMES[1])  # now somebody wants it to
    assert tiers.lies_deep(NAMES[1])

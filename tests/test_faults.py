"""Faults made on purpose strike where and as often as they were armed, and nowhere else."""

from __future__ import annotations

import pickle
import threading
from dataclasses import replace

import pytest
import torch

from mmserve.config import EngineConfig
from mmserve.faults import KINDS, NO_FAULTS, POINTS, Faults


def strikes(faults: Faults, point: str, passes: int) -> list[int]:
    found = []
    for number in range(1, passes + 1):
        try:
            faults.at(point)
        except Exception:
            found.append(number)
    return found


def test_an_armed_point_fails_from_the_pass_on_that_was_named_and_so_often() -> None:
    faults = Faults("engine.launch=error@3*2, journal.commit=locked")
    assert strikes(faults, "engine.launch", 6) == [3, 4]
    assert strikes(faults, "journal.commit", 3) == [1]
    assert strikes(faults, "tier.read", 3) == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_fault_can_be_made(kind: str) -> None:
    if kind == "device_assert" and torch.cuda.is_available():
        pytest.skip("no other test of this process could use the device: checks/lost_device.py")
    for point in POINTS:
        assert strikes(Faults(f"{point}={kind}"), point, 2) == [1]


@pytest.mark.parametrize("armed", ["engine.launch", "nowhere=error", "engine.launch=flood"])
def test_a_fault_that_does_not_exist_is_refused_with_those_that_do(armed: str) -> None:
    with pytest.raises(ValueError, match=r"journal\.commit.*disk_full"):
        Faults(armed)


def test_what_stands_still_goes_on_once_it_is_released() -> None:
    faults = Faults("engine.launch=hang")
    passed = threading.Event()

    def come_by() -> None:
        faults.at("engine.launch")
        passed.set()

    thread = threading.Thread(target=come_by)
    thread.start()
    assert not passed.is_set()
    faults.release()
    thread.join()
    assert passed.is_set()


def test_nothing_is_armed_unless_it_is_asked_for() -> None:
    assert not NO_FAULTS
    assert all(strikes(NO_FAULTS, point, 3) == [] for point in POINTS)


def test_a_configuration_goes_to_another_process_with_its_faults() -> None:
    armed = replace(EngineConfig(), faults=Faults("engine.launch=error@2"))
    assert strikes(armed.faults, "engine.launch", 2) == [2]
    other = pickle.loads(pickle.dumps(armed))
    assert strikes(other.faults, "engine.launch", 3) == [2]
    assert not pickle.loads(pickle.dumps(EngineConfig())).faults

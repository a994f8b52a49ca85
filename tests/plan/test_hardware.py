"""Machines by name, by flags and by what was measured on them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmserve.plan.hardware import MACHINES, find_hardware

GPU, CPU = "NVIDIA H100 80GB HBM3", "Intel(R) Xeon(R) (family 6 model 207)"


def measured(path: Path, device: str) -> str:
    file = path / "bench.json"
    ceilings = {"bytes_per_s": 3e12, "flops_per_s": 7e14}
    file.write_text(json.dumps({"ceilings": ceilings, "facts": {"device": device}}))
    return str(file)


@pytest.mark.parametrize("name", MACHINES)
def test_a_name_is_enough(name: str) -> None:
    machine = find_hardware(name)
    assert machine.on_gpu and machine.bytes_per_s > 1e11 and machine.memory > 1e10


def test_what_is_given_goes_first_and_says_so() -> None:
    machine = find_hardware("h100", memory=40e9)
    assert (machine.memory, machine.source) == (40e9, "given")
    assert machine.bytes_per_s == MACHINES["h100"].bytes_per_s


def test_a_cpu_needs_its_rates() -> None:
    with pytest.raises(ValueError, match="cpu needs --copy-rate, --memory"):
        find_hardware("cpu", flops_per_s=2e11)
    assert not find_hardware("cpu", bytes_per_s=25e9, flops_per_s=2e11, memory=8e9).on_gpu


@pytest.mark.parametrize(("device", "on_gpu"), [(GPU, True), (CPU, False)])
def test_a_benchmark_s_json_has_the_rates_but_not_the_memory(
    tmp_path: Path, device: str, on_gpu: bool
) -> None:
    path = measured(tmp_path, device)
    with pytest.raises(ValueError, match="needs --memory"):
        find_hardware(path)
    machine = find_hardware(path, memory=80e9)
    assert (machine.bytes_per_s, machine.flops_per_s) == (3e12, 7e14)
    assert machine.on_gpu is on_gpu and machine.source == "measured"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"ceilings": 3}'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match="no JSON of mmserve bench"):
        find_hardware(str(tmp_path / "x.json"))


def test_an_unknown_name_is_refused_with_those_known() -> None:
    with pytest.raises(ValueError, match=r"'h900' is no file and none of h200, .*cpu"):
        find_hardware("h900")

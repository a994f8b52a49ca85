"""The restore suite at toy size on the CPU: what is timed is what it says."""

from __future__ import annotations

import json
from pathlib import Path

from mmserve.bench.restore import RestoreSuite, bench_restore
from mmserve.config import ModelConfig
from tests.bench.tiny import PROBE, SHAPE


def test_a_session_is_computed_and_restored_from_host_and_disk(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    suite = RestoreSuite(SHAPE, tokens=300, step_tokens=64, repeats=2, json=path, probe=PROBE)
    report = bench_restore(suite, ModelConfig(device="cpu", dtype="float32"))
    assert [line.case for line in report.lines] == [
        "compute 300 tokens",
        "restore 300 tokens from host",
        "restore 300 tokens from disk",
    ]
    assert all(line.value and line.fault is None for line in report.lines)
    assert report.lines[1].figures.keys() == {"GB/s", "x as fast"}
    assert len(json.loads(path.read_text())["lines"]) == 3

"""First tokens through a real server of a toy shape: every kind is timed, in order."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))

from tests.bench.tiny import PROBE, SHAPE
from tests.checks.server_ttft import Check, check


@pytest.mark.slow
def test_every_kind_of_request_is_timed_through_the_server() -> None:
    shape = dataclasses.replace(SHAPE, max_model_len=2048)
    asked = Check(shape, "cpu", 3600, repeats=2, pool_bytes=1 << 23, probe=PROBE)
    report = check(asked, None)
    assert [line.fault for line in report.lines] == [None] * 5
    assert [line.case for line in report.lines if "x sooner than new" in line.figures] == [
        "server TTFT 5 known images",
        "server TTFT 5 known images behind other text",
    ]
    values = [line.value for line in report.lines]
    assert all(value is not None and value > 0 for value in values)

"""A short talk of Schemathesis with the tiny model; `make schemathesis` takes ten minutes."""

from __future__ import annotations

import pytest

from mmserve.server.openapi.operations import OPERATIONS
from tests.checks.described import ask, served


@pytest.mark.slow
def test_whatever_is_asked_is_answered_as_described_and_never_by_a_fault() -> None:
    with served() as running:
        asked = ask(running.url, "-n", "3", "--generation-deterministic")
    assert asked.returncode == 0, asked.stdout + asked.stderr
    count = len(OPERATIONS) - 1  # all but the description itself
    assert f"{count} selected / {count} total" in asked.stdout

"""`kill -9` and SIGTERM under load, a few times; `tests/checks/kill.py` does it fifty times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checks import kill


@pytest.mark.slow
def test_nothing_that_was_acknowledged_is_lost(tmp_path: Path) -> None:
    told = kill.run(tmp_path, kills=5, seed=5)
    assert told.answers and told.files and told.deleted


@pytest.mark.slow
def test_nothing_that_was_acknowledged_is_lost_to_a_server_that_is_told_to_end(
    tmp_path: Path,
) -> None:
    told = kill.run(tmp_path, kills=3, seed=6, gently=True)
    assert told.answers and told.files
    assert told.begun <= set(told.answers), "an answer that had begun was not finished"

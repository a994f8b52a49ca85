"""Many sockets and streams at once, a few; `tests/checks/crowd.py` takes thousands."""

from __future__ import annotations

import pytest

from tests.checks import crowd


@pytest.mark.slow
def test_every_stream_of_a_crowd_is_whole_and_its_own_and_idle_sockets_stay_open() -> None:
    crowd.check(sockets=100, streams=40)

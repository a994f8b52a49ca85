"""A host that runs out of memory: new work waits outside, what runs goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mmserve.server.errors import HostMemoryLowError
from mmserve.server.memory_guard import MemoryGuard, used_share
from tests.server.conftest import Running, eventually

Launch = Callable[..., Running]


def refuses(guard: MemoryGuard) -> bool:
    try:
        guard.check()
    except HostMemoryLowError:
        return True
    return False


def test_new_work_is_refused_above_the_limit_and_taken_again_well_below_it() -> None:
    shares = iter([0.5, 0.91, 0.89, 0.87, 0.89])
    guard = MemoryGuard(0.9, lambda: next(shares))
    assert [(guard.look(), refuses(guard)) for _ in range(5)] == [
        (False, False),
        (True, True),
        (True, True),
        (False, False),
        (False, False),
    ]


def test_a_limit_of_zero_is_none() -> None:
    guard = MemoryGuard(0, lambda: 1.0)
    assert not guard.look() and not refuses(guard)


@pytest.mark.parametrize(("limit", "share"), [("1000", 0.97), ("max", None)])
def test_a_container_s_limit_counts_without_what_files_can_give_back(
    tmp_path: Path, limit: str, share: float | None
) -> None:
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 700\ninactive_file 30\n")
    of_machine = used_share(tmp_path / "none")
    assert 0 < of_machine < 1
    found = used_share(tmp_path)
    assert found == pytest.approx(0.97 if share else of_machine, abs=0.05 if not share else 1e-9)


def test_the_refusal_names_the_memory_and_what_is_held_to_save_work_is_given_back(
    launch: Launch,
) -> None:
    running = launch()
    http = running.http()
    done = http.post("/v1/responses", json={"input": "hello"}).json()["id"]
    running.services.memory._read = lambda: 0.99
    assert eventually(lambda: running.engine.num_shrunk)
    refused = http.post("/v1/responses", json={"input": "hello"})
    assert refused.status_code == 503 and refused.headers["retry-after"]
    error = refused.json()["error"]
    assert error["code"] == "host_memory_low" and "99.0%" in error["message"]
    assert http.get(f"/v1/responses/{done}").json()["status"] == "completed"
    assert http.get(f"/v1/responses/{done}?stream=true").status_code == 400  # its log is gone
    running.services.memory._read = lambda: 0.5
    assert eventually(
        lambda: http.post("/v1/responses", json={"input": "hello"}).status_code == 200
    )

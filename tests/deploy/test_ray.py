"""`mmserve deploy` as it is: two replicas under Ray, one of which is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from tests.checks.replicas import MODEL, count, deployed, servers, until
from tests.model import families

pytestmark = pytest.mark.slow
ENDS = ("response.completed", "response.incomplete")


def test_a_killed_replicas_conversation_goes_on_elsewhere_and_another_replica_comes(
    tmp_path: Path,
) -> None:
    model = str(families.build("qwen2_5_vl", tmp_path))
    with deployed(tmp_path / "data", 2, "--model", model, "--device", "cpu") as served:
        until(lambda: count(served) == 2, "two replicas")
        with served.client() as client:

            def ask(text: str, **more: Any) -> Any:
                return client.responses.create(model=MODEL, input=text, max_output_tokens=4, **more)

            first = ask("Hello")
            home = first.id.split("_")[1]
            (victim,) = (each for each in servers(served) if home in each.cmdline())
            victim.kill()
            second = ask("And now?", previous_response_id=first.id)
            assert second.output_text and home not in second.id
            assert client.responses.retrieve(first.id).output_text == first.output_text
            events = [event.type for event in ask("Go on.", stream=True)]
            assert events[-1] in ENDS and "response.output_text.delta" in events
            with client.responses.connect() as socket:
                socket.response.create(
                    model=MODEL, input="And?", previous_response_id=second.id, max_output_tokens=4
                )
                last: Any = next(event for event in socket if event.type in ENDS)
            assert last.response.id.split("_")[1] == second.id.split("_")[1]
        until(lambda: count(served) == 2, "another replica")
        assert not any(home in each.cmdline() for each in servers(served))

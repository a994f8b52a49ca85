"""Going on with an answer that was cut or stopped, from its own words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from tests.server.conftest import Running
from tests.web.conftest import Tab, picture
from tests.web.test_conversation import shape_of
from tests.web.test_settings import open_settings

pytestmark = pytest.mark.browser

Visit = Callable[..., Tab]


def go_on(tab: Tab) -> None:
    tab.page.get_by_role("button", name="Continue").click()


def test_an_answer_that_was_cut_goes_on_from_its_own_words(server: Running, visit: Visit) -> None:
    tab = visit()
    open_settings(tab)
    tab.page.get_by_label("Longest answer (tokens)").fill("3")
    tab.page.get_by_role("button", name="Close").click()
    server.engine.script = "one two three four"
    tab.drop(("a.png", picture("red")))
    tab.ask("Count")
    assert tab.wait("cut").strip() == "one two three"
    server.engine.script = "and the rest"
    go_on(tab)
    text = tab.wait("done")
    assert text.startswith("one two three") and text.endswith("and the rest")
    assert shape_of(server.engine.prompts[-1]) == [
        ("user", 1, "Count"),
        ("assistant", 0, "one two three"),
    ]

    # No response holds this answer, so the next question tells it whole.
    tab.wait_until_stored("turns", "all => all[0]?.answer.status === 'done'")
    tab.page.reload()
    server.engine.script = "fine"
    tab.answered("Thanks")
    roles = [role for role, _, _ in shape_of(server.engine.prompts[-1])]
    assert roles == ["user", "assistant", "user"]
    assert "and the rest" in shape_of(server.engine.prompts[-1])[1][2]


def test_going_on_can_be_stopped_and_refused_and_loses_nothing(
    server: Running, visit: Visit
) -> None:
    tab = visit(quiet_network=False)
    server.engine.script, server.engine.hold_at = "one two three", 2
    tab.ask("Count")
    tab.wait_for_text("two")
    tab.page.get_by_role("button", name="Stop").click()
    tab.wait("stopped")
    server.engine.queue_full = True
    go_on(tab)
    expect(tab.page.locator(".note")).to_contain_text("The server is busy.")
    assert tab.page.locator("article .markdown").inner_text() == "one two"
    server.engine.queue_full = False

    server.engine.script = "four five six"
    go_on(tab)
    tab.wait_for_text("five")
    tab.page.get_by_role("button", name="Stop").click()
    tab.wait("stopped")
    assert tab.page.locator("article .markdown").inner_text().endswith("five")
    assert server.idle()

"""Several tabs of one browser, and what a reload must not lose."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from tests.server.conftest import Running
from tests.web.conftest import Tab

pytestmark = pytest.mark.browser

Visit = Callable[..., Tab]


def beside(tab: Tab, url: str) -> Tab:
    """Another tab of the same browser."""
    other = Tab(tab.page.context.new_page(), tab.errors)
    other.page.on("pageerror", lambda error: tab.errors.append(str(error)))
    other.page.goto(url)
    other.page.wait_for_selector("textarea")
    return other


def test_a_second_tab_sees_what_is_asked_in_the_first(server: Running, visit: Visit) -> None:
    tab = visit()
    other = beside(tab, server.url)
    tab.answered("Hello")
    expect(other.page.locator("nav a")).to_have_text(["Hello"])
    other.page.locator("nav a").click()
    expect(other.page.locator("article .markdown")).to_have_text("you said: Hello")

    server.engine.script, server.engine.hold_at = "one two three four five", 3
    tab.ask("Count")
    tab.wait_for_text("three")
    other.wait_for_text("three")
    server.engine.hold_at = None
    assert other.wait("done") == tab.wait("done") == "one two three four five"
    assert len(server.engine.prompts) == 2

    server.engine.script = None
    assert other.answered("Thanks") == "you said: Thanks"
    expect(tab.page.locator(".question")).to_have_text(["Hello", "Count", "Thanks"])


def test_a_chat_deleted_in_one_tab_is_gone_in_the_other(server: Running, visit: Visit) -> None:
    tab = visit()
    tab.answered("Hello")
    tab.wait_until_stored("turns", "all => all[0]?.answer.status === 'done'")
    other = beside(tab, tab.page.url)
    expect(other.page.locator(".question")).to_have_text("Hello")
    row = tab.page.locator("nav li")
    row.get_by_role("button", name="More about “Hello”").click()
    row.get_by_role("button", name="Delete", exact=True).click()
    row.get_by_role("button", name="Really delete?").click()
    other.page.wait_for_selector(".empty")
    expect(other.page.locator("nav a")).to_have_count(0)


def test_what_was_being_written_survives_a_reload(visit: Visit) -> None:
    tab = visit()
    tab.page.fill("textarea", "half a thought")
    tab.page.reload()
    expect(tab.page.locator("textarea")).to_have_value("half a thought")
    tab.page.press("textarea", "Enter")
    tab.wait("done")
    tab.page.fill("textarea", "another")
    tab.wait_until_stored("turns", "all => all[0]?.answer.status === 'done'")
    tab.page.reload()
    expect(tab.page.locator("textarea")).to_have_value("another")
    tab.new_chat()
    expect(tab.page.locator("textarea")).to_have_value("")

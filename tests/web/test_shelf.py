"""The shelf: every picture of a chat with what the server knows of it, and what can be done."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from tests.server.conftest import Running
from tests.web.conftest import Tab, picture
from tests.web.test_conversation import shape_of
from tests.web.test_look import PHONE, violations

pytestmark = pytest.mark.browser

Visit = Callable[..., Tab]


def open_shelf(tab: Tab) -> None:
    tab.page.get_by_role("button", name="Pictures of this chat").click()
    expect(tab.page.get_by_role("dialog", name="Pictures of this chat")).to_be_visible()


def begin(visit: Visit) -> Tab:
    tab = visit()
    tab.drop(("a.png", picture("red")), ("b.png", picture("blue")))
    tab.answered("Which?")
    return tab


def test_the_shelf_lists_every_picture_of_the_chat(visit: Visit) -> None:
    tab = begin(visit)
    open_shelf(tab)
    rows = tab.page.get_by_role("dialog").get_by_role("listitem")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("Picture 1")
    expect(rows.first).to_contain_text("a.png")
    expect(rows.last).to_contain_text("Picture 2")
    expect(rows.first.locator("img")).to_have_count(1)


def test_a_forgotten_picture_is_not_seen_and_comes_back(server: Running, visit: Visit) -> None:
    tab = begin(visit)
    open_shelf(tab)
    first = tab.page.get_by_role("dialog").get_by_role("listitem").first
    first.get_by_role("button", name="Forget").click()
    expect(first).to_contain_text("forgotten")
    tab.page.keyboard.press("Escape")
    tab.answered("And now?")
    states = [part.state for part in server.engine.prompts[-1][0].parts if hasattr(part, "state")]
    assert states == ["gone", "shown"]

    open_shelf(tab)
    first.get_by_role("button", name="Show again").click()
    expect(first).not_to_contain_text("forgotten")


def test_a_picture_is_pinned_and_unpinned(visit: Visit) -> None:
    tab = begin(visit)
    open_shelf(tab)
    first = tab.page.get_by_role("dialog").get_by_role("listitem").first
    first.get_by_role("button", name="Pin", exact=True).click()
    expect(first).to_contain_text("pinned")
    first.get_by_role("button", name="Unpin").click()
    expect(first).not_to_contain_text("pinned")


def test_a_picture_is_asked_about_again_without_being_sent(server: Running, visit: Visit) -> None:
    tab = begin(visit)
    sent: list[str] = []
    tab.page.on("request", lambda request: sent.append(request.url))
    open_shelf(tab)
    second = tab.page.get_by_role("dialog").get_by_role("listitem").last
    second.get_by_role("button", name="Ask again").click()
    expect(tab.page.locator(".tray li")).to_have_count(1)
    tab.answered("And this one?")
    assert shape_of(server.engine.prompts[-1])[-1] == ("user", 1, "And this one?")
    assert not [url for url in sent if url.endswith("/v1/files")]


@pytest.mark.parametrize(
    "options", [{}, {"color_scheme": "dark"}, PHONE], ids=["light", "dark", "phone"]
)
def test_axe_finds_nothing_wrong_in_the_shelf(visit: Visit, options: dict[str, object]) -> None:
    tab = visit(**options)
    tab.drop(("a.png", picture("red")))
    tab.page.fill("textarea", "What?")
    tab.page.locator("form button.go").click()
    tab.wait("done")
    open_shelf(tab)
    expect(tab.page.get_by_role("dialog").get_by_role("listitem")).to_have_count(1)
    assert violations(tab) == []

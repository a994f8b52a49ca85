"""Versions of questions and answers: edit, ask again, switch, go on elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from tests.server.conftest import Running
from tests.web.conftest import Tab, picture
from tests.web.test_conversation import shape_of

pytestmark = pytest.mark.browser

Visit = Callable[..., Tab]


def questions(tab: Tab) -> list[str]:
    return tab.page.locator(".question").all_inner_texts()


def edit(tab: Tab, old: str, new: str) -> None:
    """Ask the question `old` anew as `new`."""
    asked = tab.page.locator(".asked", has_text=old)
    asked.get_by_role("button", name="Edit").click()
    box = tab.page.get_by_label("Edit the message")
    expect(box).to_be_focused()
    expect(box).to_have_value(old)
    box.fill(new)
    box.press("Enter")
    expect(tab.page.locator(".question").last).to_have_text(new)
    tab.wait("done")


def test_an_edited_question_is_a_branch_and_both_stay(server: Running, visit: Visit) -> None:
    tab = visit()
    tab.answered("One")
    tab.answered("Two")
    tab.answered("Three")
    edit(tab, "Two", "Zwei")
    assert questions(tab) == ["One", "Zwei"]
    assert shape_of(server.engine.prompts[-1]) == [
        ("user", 0, "One"),
        ("assistant", 0, "you said: One"),
        ("user", 0, "Zwei"),
    ]
    versions = tab.page.get_by_role("group", name="Versions of the question")
    expect(versions).to_have_text("2/2")
    versions.get_by_role("button", name="Previous version").click()
    expect(tab.page.locator(".question")).to_have_text(["One", "Two", "Three"])
    expect(versions).to_have_text("1/2")

    tab.wait_until_stored("conversations", "chats => chats[0].leafId !== null")
    tab.page.reload()
    expect(tab.page.locator(".question")).to_have_text(["One", "Two", "Three"])
    tab.answered("Four")
    assert [text for _, _, text in shape_of(server.engine.prompts[-1])][::2] == [
        "One",
        "Two",
        "Three",
        "Four",
    ]


def test_a_second_answer_stands_beside_the_first(server: Running, visit: Visit) -> None:
    tab = visit()
    server.engine.script = "first answer"
    tab.drop(("a.png", picture("red")))
    tab.answered("Tell me")
    server.engine.script = "second answer"
    tab.page.get_by_role("button", name="Another answer").click()
    tab.wait_for_text("second answer")
    tab.wait("done")
    assert shape_of(server.engine.prompts[-1]) == [("user", 1, "Tell me")]
    versions = tab.page.get_by_role("group", name="Versions of the answer")
    expect(versions).to_have_text("2/2")
    expect(tab.page.locator(".pictures img")).to_have_count(1)
    versions.get_by_role("button", name="Previous version").click()
    expect(tab.page.locator("article .markdown")).to_have_text("first answer")
    expect(tab.page.get_by_role("group", name="Versions of the question")).to_have_count(0)


def test_an_edit_may_change_pictures_and_is_given_up_by_escape(
    server: Running, visit: Visit
) -> None:
    tab = visit()
    tab.drop(("a.png", picture("red")), ("b.png", picture("blue")))
    tab.answered("Which?")
    uploads: list[str] = []
    tab.page.on("request", lambda request: uploads.append(request.url))
    tab.page.get_by_role("button", name="Edit").click()
    tab.page.keyboard.press("Escape")
    expect(tab.page.locator(".question")).to_have_text("Which?")

    tab.page.get_by_role("button", name="Edit").click()
    tab.page.get_by_role("button", name="Remove a.png").click()
    tab.page.get_by_label("Edit the message").press("Enter")
    expect(tab.page.locator(".pictures img")).to_have_count(1)
    tab.wait("done")
    assert shape_of(server.engine.prompts[-1]) == [("user", 1, "Which?")]
    assert not [url for url in uploads if url.endswith("/v1/files")]


def test_a_fork_is_a_chat_of_its_own(server: Running, visit: Visit) -> None:
    tab = visit()
    tab.drop(("a.png", picture("red")))
    tab.answered("One")
    tab.answered("Two")
    tab.page.get_by_role("button", name="Go on in a new chat").first.click()
    expect(tab.page.locator("nav a")).to_have_count(2)
    expect(tab.page.locator(".question")).to_have_text(["One"])
    expect(tab.page.locator(".pictures img")).to_have_count(1)
    tab.answered("Deux")
    assert shape_of(server.engine.prompts[-1]) == [
        ("user", 1, "One"),
        ("assistant", 0, tab.page.locator("article .markdown").first.inner_text()),
        ("user", 0, "Deux"),
    ]
    tab.page.locator("nav a").last.click()
    expect(tab.page.locator(".question")).to_have_text(["One", "Two"])


def test_a_failed_question_can_be_edited_instead(server: Running, visit: Visit) -> None:
    tab = visit()
    server.engine.queue_full = True
    tab.ask("Hello?")
    tab.wait("failed")
    server.engine.queue_full = False
    edit(tab, "Hello?", "Hi?")
    assert tab.wait("done") == "you said: Hi?"

"""The list of chats: finding, naming, pinning, copying out and in, and links for other browsers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.server.conftest import KEY, Running
from tests.server.fake_engine import FakeEngine
from tests.web.conftest import Tab, picture
from tests.web.test_conversation import shape_of

pytestmark = pytest.mark.browser

Visit = Callable[..., Tab]
Launch = Callable[..., Running]


def choose(tab: Tab, title: str, action: str) -> None:
    """Take an entry of a chat's menu."""
    row = tab.page.locator("nav li", has_text=title)
    row.hover()
    row.get_by_role("button", name=f"More about “{title}”").click()
    row.get_by_role("button", name=action, exact=True).click()


def chats(tab: Tab, *titles: str) -> None:
    for title in titles:
        tab.answered(title)
        tab.new_chat()


def test_a_chat_is_renamed_in_place_and_stays_so(visit: Visit) -> None:
    tab = visit()
    chats(tab, "First chat")
    choose(tab, "First chat", "Rename")
    box = tab.page.get_by_label("New name for “First chat”")
    expect(box).to_be_focused()
    box.fill("About colors")
    box.press("Enter")
    expect(tab.page.locator("nav a")).to_have_text(["About colors"])
    tab.wait_until_stored("conversations", "all => all[0].title === 'About colors'")
    tab.page.reload()
    tab.page.locator("nav a").click()
    tab.answered("More")
    expect(tab.page.locator("nav a")).to_have_text(["About colors"])


def test_pinned_chats_stand_first(visit: Visit) -> None:
    tab = visit()
    chats(tab, "Old", "New")
    choose(tab, "Old", "Pin")
    expect(tab.page.locator("nav h2")).to_have_text(["Pinned", "Today"])
    expect(tab.page.locator("nav a")).to_have_text(["Old", "New"])
    tab.wait_until_stored("conversations", "all => all.some(({ pinned }) => pinned)")
    tab.page.reload()
    expect(tab.page.locator("nav a")).to_have_text(["Old", "New"])
    choose(tab, "Old", "Unpin")
    expect(tab.page.locator("nav a")).to_have_text(["New", "Old"])


def test_search_reads_titles_and_everything_that_was_said(server: Running, visit: Visit) -> None:
    tab = visit()
    server.engine.script = "The Eiffel tower."
    tab.answered("What is this?")
    tab.new_chat()
    server.engine.script = None
    chats(tab, "Another thing")
    tab.page.keyboard.press("Control+k")
    box = tab.page.get_by_label("Search chats")
    expect(box).to_be_focused()
    box.fill("eiffel")
    expect(tab.page.locator("nav a")).to_have_text(["What is this?"])
    box.fill("ANOTHER")
    expect(tab.page.locator("nav a")).to_have_text(["Another thing"])
    box.fill("nowhere")
    expect(tab.page.get_by_text("No chat has these words.")).to_be_visible()
    box.press("Escape")
    expect(tab.page.locator("nav a")).to_have_count(2)


def test_an_exported_chat_comes_back_in_another_browser(
    server: Running, visit: Visit, tmp_path: Path
) -> None:
    tab = visit()
    tab.drop(("a.png", picture("red")))
    tab.answered("What color?")
    tab.page.get_by_role("button", name="Another answer").click()
    expect(tab.page.get_by_role("group", name="Versions of the answer")).to_have_text("2/2")
    tab.wait("done")
    answer = tab.answered("Sure?")
    tab.wait_until_stored("turns", "all => all.every(t => t.answer.status === 'done')")
    with tab.page.expect_download() as downloading:
        choose(tab, "What color?", "Export as JSON")
    file = tmp_path / downloading.value.suggested_filename
    assert file.name == "What-color.json"
    downloading.value.save_as(file)
    assert json.loads(file.read_text())["format"] == "mmserve-chat"

    other = visit()
    other.page.set_input_files("input[accept*=json]", file)
    expect(other.page.get_by_text("Chat imported.")).to_be_visible()
    expect(other.page.locator(".question")).to_have_text(["What color?", "Sure?"])
    expect(other.page.locator(".pictures img")).to_have_count(1)
    expect(other.page.get_by_role("group", name="Versions of the answer")).to_have_text("2/2")
    other.answered("And now?")
    assert shape_of(server.engine.prompts[-1])[-2:] == [
        ("assistant", 0, answer),
        ("user", 0, "And now?"),
    ]


def test_an_imported_chat_goes_on_at_a_server_that_never_saw_it(
    server: Running, visit: Visit, launch: Launch, tmp_path: Path
) -> None:
    tab = visit()
    tab.drop(("a.png", picture("red")))
    first = tab.answered("What color?")
    tab.wait_until_stored("turns", "all => all[0]?.answer.status === 'done'")
    tab.wait_until_stored("pictures", "all => all.length === 1")
    with tab.page.expect_download() as downloading:
        choose(tab, "What color?", "Export as JSON")
    file = tmp_path / "chat.json"
    downloading.value.save_as(file)

    fresh = launch(FakeEngine())
    other = visit(fresh.url)
    other.page.set_input_files("input[accept*=json]", file)
    expect(other.page.locator(".question")).to_have_text(["What color?"])
    other.answered("And now?")
    assert shape_of(fresh.engine.prompts[-1]) == [
        ("user", 1, "What color?"),
        ("assistant", 0, first),
        ("user", 0, "And now?"),
    ]


def test_a_chat_is_exported_as_markdown(visit: Visit, tmp_path: Path) -> None:
    tab = visit()
    tab.answered("Hello **there**")
    tab.wait_until_stored("turns", "all => all[0]?.answer.status === 'done'")
    with tab.page.expect_download() as downloading:
        choose(tab, "Hello **there**", "Export as Markdown")
    text = Path(downloading.value.path()).read_text()
    assert text.startswith("# Hello **there**\n\n## You\n\nHello **there**\n\n## Answer\n\n")


def test_a_file_that_is_no_chat_is_refused_in_a_sentence(visit: Visit, tmp_path: Path) -> None:
    tab = visit()
    file = tmp_path / "x.json"
    file.write_text('{"format": "mmserve-chat", "version": 1, "turns": [1]}')
    tab.page.set_input_files("input[accept*=json]", file)
    expect(tab.page.get_by_text("not a chat that was exported here")).to_be_visible()
    expect(tab.page.locator("nav a")).to_have_count(0)


def test_a_link_opens_the_chat_in_another_browser(server: Running, visit: Visit) -> None:
    tab = visit(permissions=["clipboard-read", "clipboard-write"])
    tab.drop(("a.png", picture("red")))
    first = tab.answered("What color?")
    second = tab.answered("Sure?")
    tab.wait_until_stored("turns", "all => all.at(-1)?.answer.status === 'done'")
    choose(tab, "What color?", "Copy link")
    expect(tab.page.get_by_text("Link copied.")).to_be_visible()
    link = tab.page.evaluate("navigator.clipboard.readText()")
    assert "#/r/resp_" in link

    other = visit(link)
    expect(other.page.locator(".question")).to_have_text(["What color?", "Sure?"])
    expect(other.page.locator("article .markdown")).to_have_text([first, second])
    expect(other.page.locator(".pictures img")).to_have_count(1)
    other.answered("And now?")
    assert shape_of(server.engine.prompts[-1])[0] == ("user", 1, "What color?")

    # In the first browser the same address is its own chat.
    tab.page.goto("about:blank")
    tab.page.goto(link)
    expect(tab.page.locator(".question")).to_have_text(["What color?", "Sure?"])
    expect(tab.page.locator("nav a")).to_have_count(1)


def test_a_link_to_what_is_gone_says_so(server: Running, visit: Visit) -> None:
    tab = visit(f"{server.url}/#/r/resp_gone", quiet_network=False)
    expect(tab.page.get_by_text("The server no longer has this chat.")).to_be_visible()


def test_a_link_waits_for_the_key(launch: Launch, visit: Visit) -> None:
    locked = launch(FakeEngine(), api_keys=(KEY,))
    tab = visit(locked.url, quiet_network=False, permissions=["clipboard-read", "clipboard-write"])
    tab.page.get_by_label("API key").fill(KEY)
    tab.page.keyboard.press("Enter")
    tab.answered("Secret")
    tab.wait_until_stored("turns", "all => all[0]?.answer.status === 'done'")
    choose(tab, "Secret", "Copy link")
    expect(tab.page.get_by_text("Link copied.")).to_be_visible()
    link = tab.page.evaluate("navigator.clipboard.readText()")
    other = visit(link, quiet_network=False)
    other.page.get_by_label("API key").fill(KEY)
    other.page.keyboard.press("Enter")
    expect(other.page.locator(".question")).to_have_text(["Secret"])

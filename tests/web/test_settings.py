"""Settings, themes, shortcuts and their sheet, and where the key is kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from tests.server.conftest import KEY, Running
from tests.server.fake_engine import FakeEngine
from tests.web.conftest import Tab
from tests.web.test_conversation import shape_of
from tests.web.test_look import violations

pytestmark = pytest.mark.browser

Visit = Callable[..., Tab]
Launch = Callable[..., Running]


def open_settings(tab: Tab) -> None:
    tab.page.keyboard.press("Control+,")
    expect(tab.page.get_by_role("dialog", name="Settings")).to_be_visible()


def test_what_is_set_is_sent_and_survives_a_reload(server: Running, visit: Visit) -> None:
    tab = visit()
    open_settings(tab)
    tab.page.get_by_label("System prompt").fill("Be brief.")
    tab.page.get_by_label("Temperature").fill("0.5")
    tab.page.get_by_label("Longest answer (tokens)").fill("7")
    tab.page.get_by_role("button", name="Close").click()
    tab.page.reload()
    tab.ask("one two three four five six seven eight nine")
    tab.wait("cut")
    assert shape_of(server.engine.prompts[-1])[0] == ("system", 0, "Be brief.")
    params = server.engine.params[-1]
    assert (params.temperature, params.max_tokens) == (0.5, 7)
    open_settings(tab)
    tab.page.get_by_role("button", name="Reset to defaults").click()
    expect(tab.page.get_by_label("Temperature")).to_have_value("")


def test_a_number_out_of_range_is_brought_into_it(visit: Visit) -> None:
    tab = visit()
    open_settings(tab)
    box = tab.page.get_by_label("Top p")
    box.fill("7")
    box.blur()
    expect(box).to_have_value("1")


def test_a_session_policy_is_sent(server: Running, visit: Visit) -> None:
    tab = visit()
    frames: list[str] = []
    tab.page.on("websocket", lambda socket: socket.on("framesent", lambda f: frames.append(str(f))))
    tab.page.reload()
    tab.page.wait_for_selector("textarea")
    open_settings(tab)
    tab.page.get_by_role("button", name="Keep a window").click()
    tab.page.get_by_label("Text tokens kept").fill("512")
    tab.page.get_by_role("button", name="Pinned pictures").click()
    tab.page.get_by_role("button", name="Close").click()
    tab.answered("Hello")
    policy = '"session_policy":{"window":512,"images":"pinned","summary":false}'
    assert any(policy in frame for frame in frames)


def test_the_theme_is_chosen_and_there_before_the_page_is(visit: Visit) -> None:
    tab = visit(color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = tab.page.evaluate(ground)
    open_settings(tab)
    tab.page.get_by_role("button", name="Dark").click()
    assert tab.page.evaluate(ground) != light
    tab.page.route("**/assets/index-*.js", lambda route: route.abort())
    tab.page.reload(wait_until="commit")
    tab.page.wait_for_selector("body", state="attached")
    assert tab.page.evaluate("document.documentElement.dataset.theme") == "dark"
    tab.errors.clear()  # the script that was kept away


def test_shortcuts_do_what_their_sheet_says(server: Running, visit: Visit) -> None:
    tab = visit(permissions=["clipboard-read", "clipboard-write"])
    tab.answered("Hello")
    tab.page.keyboard.press("Control+/")
    sheet = tab.page.get_by_role("dialog", name="Keyboard shortcuts")
    expect(sheet).to_contain_text("Edit the last question")
    assert violations(tab) == []
    tab.page.keyboard.press("Control+/")
    expect(sheet).to_have_count(0)

    tab.page.keyboard.press("Control+Shift+C")
    expect(tab.page.get_by_text("Copied.")).to_be_visible()
    assert tab.page.evaluate("navigator.clipboard.readText()") == "you said: Hello"

    tab.page.focus("textarea")
    tab.page.keyboard.press("ArrowUp")
    expect(tab.page.get_by_label("Edit the message")).to_have_value("Hello")
    tab.page.keyboard.press("Escape")
    tab.page.keyboard.press("Control+Shift+O")
    tab.page.wait_for_selector(".empty")
    expect(tab.page.locator("textarea")).to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_wrong_in_the_settings(visit: Visit, scheme: str) -> None:
    tab = visit(color_scheme=scheme)
    open_settings(tab)
    tab.page.get_by_role("button", name="Keep a window").click()
    assert violations(tab) == []


def test_a_key_is_kept_in_memory_if_the_person_likes(launch: Launch, visit: Visit) -> None:
    locked = launch(FakeEngine(), api_keys=(KEY,))
    tab = visit(locked.url, quiet_network=False)
    tab.page.get_by_label("API key").fill(KEY)
    tab.page.get_by_label("Keep it until the tab is closed").uncheck()
    tab.page.get_by_role("button", name="Use this key").click()
    tab.answered("Hello")
    stored = "[...Object.values(localStorage), ...Object.values(sessionStorage)].join()"
    assert KEY not in tab.page.evaluate(stored)
    tab.page.reload()
    expect(tab.page.get_by_label("API key")).to_be_visible()

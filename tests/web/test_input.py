"""Keys, composition, paste, drop and what happens to files that are no pictures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from tests.server.conftest import Running
from tests.web.conftest import Tab, picture
from tests.web.test_conversation import shape_of

pytestmark = pytest.mark.browser

Visit = Callable[..., Tab]


def test_enter_during_a_composition_does_not_send(server: Running, visit: Visit) -> None:
    tab = visit()
    tab.page.focus("textarea")
    chrome = tab.page.context.new_cdp_session(tab.page)
    compose = {"text": "nihao", "selectionStart": 5, "selectionEnd": 5}
    chrome.send("Input.imeSetComposition", compose)
    enter = {"type": "rawKeyDown", "key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 229}
    chrome.send("Input.dispatchKeyEvent", enter)
    chrome.send("Input.insertText", {"text": "你好"})
    expect(tab.page.locator("textarea")).to_have_value("你好")
    tab.page.keyboard.press("Enter")
    assert tab.wait("done") == "you said: 你好"
    assert [shape_of(prompt) for prompt in server.engine.prompts] == [[("user", 0, "你好")]]


def test_a_key_code_of_229_alone_does_not_send(server: Running, visit: Visit) -> None:
    tab = visit()
    tab.page.fill("textarea", "hello")
    init = {"key": "Enter", "keyCode": 229, "bubbles": True, "cancelable": True}
    tab.page.dispatch_event("textarea", "keydown", init)
    tab.page.fill("textarea", "hello, world")  # were it sent, this would come second
    tab.page.press("textarea", "Enter")
    assert tab.wait("done") == "you said: hello, world"
    assert len(server.engine.prompts) == 1


def test_shift_enter_starts_a_new_line(server: Running, visit: Visit) -> None:
    tab = visit()
    tab.page.fill("textarea", "one")
    tab.page.press("textarea", "Shift+Enter")
    tab.page.keyboard.type("two")
    tab.page.keyboard.press("Enter")
    tab.wait("done")
    assert tab.page.inner_text(".question") == "one\ntwo"


def test_a_pasted_picture_is_attached_and_pasted_text_is_not(visit: Visit) -> None:
    tab = visit()
    tab.paste("clip.png", picture("green"))
    tab.page.wait_for_selector(".tray [data-state=ready]")
    expect(tab.page.locator(".tray li")).to_have_count(1)


def test_the_button_takes_several_files_and_each_can_be_removed(
    server: Running, visit: Visit
) -> None:
    tab = visit()
    files = [
        {"name": f"{color}.png", "mimeType": "image/png", "buffer": picture(color)}
        for color in ("red", "green", "blue")
    ]
    tab.page.set_input_files("input[type=file][multiple]", files)  # type: ignore[arg-type]
    tab.page.wait_for_function(
        "() => document.querySelectorAll('.tray [data-state=ready]').length === 3"
    )
    tab.page.get_by_role("button", name="Remove green.png").click()
    expect(tab.page.locator(".tray li")).to_have_count(2)
    tab.answered("Which?")
    assert len(server.engine.prompts[-1][-1].parts) == 3  # two pictures and the text


def test_a_file_that_is_no_picture_is_refused_in_a_sentence(visit: Visit) -> None:
    tab = visit()
    tab.drop(("notes.png", b"not a picture"))
    sentence = "notes.png This file is not a picture the browser can open."
    expect(tab.page.get_by_role("alert")).to_contain_text(sentence)
    tab.page.fill("textarea", "hello")
    expect(tab.page.get_by_role("button", name="Send")).to_be_disabled()
    tab.page.get_by_role("button", name="Remove notes.png").click()
    expect(tab.page.get_by_role("button", name="Send")).to_be_enabled()


def test_an_upload_that_failed_can_be_tried_again(visit: Visit) -> None:
    tab = visit(quiet_network=False)
    tab.page.route("**/v1/files", lambda route: route.abort())
    tab.drop(("a.png", picture("red")))
    expect(tab.page.get_by_role("alert")).to_contain_text("could not be reached")
    tab.page.unroute("**/v1/files")
    tab.page.get_by_role("button", name="Upload a.png again").click()
    tab.page.wait_for_selector(".tray [data-state=ready]")


def test_a_foreign_format_is_converted(server: Running, visit: Visit) -> None:
    tab = visit()
    header = b"BM" + (14 + 40 + 4).to_bytes(4, "little") + bytes(4) + (54).to_bytes(4, "little")
    info = b"".join(n.to_bytes(4, "little") for n in (40, 1, 1))
    bitmap = header + info + b"\x01\x00\x18\x00" + bytes(24) + b"\x00\x00\xff\x00"
    tab.drop(("dot.bmp", bitmap), kind="image/bmp")
    assert tab.answered("Color?").endswith("Color?")


def test_a_thumbnail_opens_large_and_escape_closes_it(visit: Visit) -> None:
    tab = visit()
    tab.drop(("a.png", picture("red")))
    tab.page.get_by_role("button", name="View a.png").click()
    tab.page.wait_for_selector("dialog img")
    tab.page.keyboard.press("Escape")
    tab.page.wait_for_selector("dialog", state="detached")
    expect(tab.page.locator(".tray li")).to_have_count(1)

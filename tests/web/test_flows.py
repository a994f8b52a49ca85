"""The whole way through the page, in both themes, both languages, on a desk and on a phone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.server.conftest import Running
from tests.server.proxy import CuttingProxy
from tests.web.conftest import Tab, picture
from tests.web.test_conversation import shape_of
from tests.web.test_look import PHONE, violations

pytestmark = pytest.mark.browser

Visit = Callable[..., Tab]
WAYS: list[dict[str, Any]] = [
    {"color_scheme": scheme, "locale": locale, **size}
    for scheme, locale, size in product(("light", "dark"), ("en", "zh-CN"), ({}, PHONE))
]
SCRIPT = " ".join(f"字{n}" for n in range(120))


def name_of(way: dict[str, Any]) -> str:
    size = "phone" if "has_touch" in way else "desk"
    return f"{way['color_scheme']}-{way['locale']}-{size}"


def send(tab: Tab, text: str) -> None:
    tab.page.fill("form.composer textarea", text)
    tab.page.locator("form.composer button.go").click()
    expect(tab.page.locator(".question").last).to_have_text(text)


def attach_three_ways(tab: Tab) -> None:
    tab.drop(("drop.png", picture("red")))
    tab.paste("paste.png", picture("green"))
    button = {"name": "button.png", "mimeType": "image/png", "buffer": picture("blue")}
    tab.page.set_input_files("input[type=file][multiple]", button)  # type: ignore[arg-type]
    expect(tab.page.locator(".tray [data-state=ready]")).to_have_count(3)


@pytest.mark.parametrize("way", WAYS, ids=name_of)
def test_pictures_branches_a_reload_and_a_cut_network(
    server: Running, proxy: CuttingProxy, visit: Visit, way: dict[str, Any]
) -> None:
    tab = visit(proxy.url, quiet_network=False, **way)
    attach_three_ways(tab)
    send(tab, "One")
    tab.wait("done")
    assert shape_of(server.engine.prompts[-1]) == [("user", 3, "One")]

    tab.page.locator(".asked .actions .small-button").last.click()
    tab.page.locator("form.editor textarea").fill("Two")
    tab.page.locator("form.editor .primary").click()
    expect(tab.page.locator(".question")).to_have_text("Two")
    tab.wait("done")
    versions = tab.page.locator(".asked .versions")
    expect(versions).to_have_text("2/2")
    versions.locator("button").first.click()
    expect(tab.page.locator(".question")).to_have_text("One")

    server.engine.script, server.engine.hold_at = SCRIPT, 31
    send(tab, "Three")
    tab.wait_for_text("字30")
    tab.wait_until_stored("turns", "all => all.some(t => t.text === 'Three' && t.answer.text)")
    tab.page.reload()
    tab.wait_for_text("字30")
    server.engine.hold_at = 71
    tab.wait_for_text("字70")
    proxy.cut()
    server.engine.hold_at = None
    assert tab.wait("done") == SCRIPT
    assert [text for _, _, text in shape_of(server.engine.prompts[-1])][::2] == ["One", "Three"]
    tab.page.wait_for_selector(".banner", state="detached")
    assert violations(tab) == []

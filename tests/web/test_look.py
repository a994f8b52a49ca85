"""Languages, themes, phones, scrolling, accessibility and hostile answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.server.conftest import Running
from tests.web.conftest import Tab, picture

pytestmark = pytest.mark.browser

Visit = Callable[..., Tab]

CORPUS = Path(__file__).parents[2] / "web" / "src" / "text" / "hostile.json"
AXE = Path(__file__).parents[2] / "web" / "node_modules" / "axe-core" / "axe.min.js"
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "has_touch": True}
RICH = """# Title

A *list*:

- one
- [link](https://example.org)

| a | b |
|---|--:|
| 1 | 2 |

```python
def f(x: int) -> int:
    return x  # comment
```
"""
HEAR_LABELS = """() => {
  const button = document.querySelector('.code-bar button');
  window.labels = [];
  new MutationObserver(() => window.labels.push(button.textContent))
    .observe(button, { childList: true, characterData: true, subtree: true });
}"""
HOSTILE = """<img src=x onerror="window.hacked=1"> <script>window.hacked=1</script>

[go](javascript:window.hacked=1) ![leak](https://evil.example/leak.png)

<svg onload="window.hacked=1"></svg> <a href="data:text/html,x" onclick="window.hacked=1">x</a>

```"><img src=x onerror="window.hacked=1">
code
```
"""


def violations(tab: Tab) -> list[str]:
    """What axe-core finds, as `rule: selectors`. Runs in an own world, past the page's policy."""
    if not AXE.is_file():
        pytest.skip("axe-core is not installed (npm ci in web/)")
    tab.settle()
    tab.page.evaluate(AXE.read_text())
    found = tab.page.evaluate("axe.run()")["violations"]
    return [f"{rule['id']}: {[node['target'] for node in rule['nodes']]}" for rule in found]


@pytest.mark.parametrize(
    "options",
    [{}, {"color_scheme": "dark"}, {"locale": "zh-CN"}, PHONE],
    ids=["light", "dark", "zh-CN", "phone"],
)
def test_axe_finds_nothing_wrong(server: Running, visit: Visit, options: dict[str, Any]) -> None:
    server.engine.script = RICH
    tab = visit(**options)
    assert violations(tab) == []
    tab.drop(("a.png", picture("red")), ("b.png", b"broken"))
    assert violations(tab) == []
    tab.page.locator(".tray .remove").last.click()
    tab.page.fill("textarea", "Describe it")
    tab.page.locator("form button.go").click()
    tab.wait("done")
    tab.page.wait_for_selector(".hljs-keyword")
    assert violations(tab) == []


def test_axe_finds_nothing_wrong_in_an_open_menu_or_a_failure(
    server: Running, visit: Visit
) -> None:
    server.engine.queue_full = True
    tab = visit(**PHONE)
    tab.page.fill("textarea", "Hello")
    tab.page.locator("form button.go").click()
    tab.wait("failed")
    assert violations(tab) == []
    tab.page.get_by_role("button", name="Open the list of chats").click()
    expect(tab.page.locator("nav")).to_be_visible()
    assert violations(tab) == []


def test_the_page_speaks_the_browsers_language_and_switches(visit: Visit) -> None:
    tab = visit(locale="zh-CN")
    page, title = tab.page.locator("html"), tab.page.locator("h1")
    expect(page).to_have_attribute("lang", "zh-CN")
    expect(title).to_have_text("给我看一张图片")
    tab.page.get_by_role("button", name="English").click()
    expect(title).to_have_text("Show me a picture")
    tab.page.reload()
    expect(title).to_have_text("Show me a picture")
    expect(page).to_have_attribute("lang", "en")


@pytest.mark.parametrize(("scheme", "light"), [("light", True), ("dark", False)])
def test_the_theme_follows_the_system(visit: Visit, scheme: str, light: bool) -> None:
    tab = visit(color_scheme=scheme)
    color = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(n) for n in color[4:-1].split(",")) > 380) is light


def test_a_phone_shows_everything_without_scrolling_sideways(server: Running, visit: Visit) -> None:
    server.engine.script = RICH + "\n" + "x" * 300
    tab = visit(**PHONE)
    tab.drop(("a.png", picture("red", (900, 300))))
    tab.page.fill("textarea", "Describe it")
    tab.page.locator("form button.go").click()
    tab.wait("done")
    tab.page.wait_for_selector(".hljs-keyword")
    tab.settle()
    assert tab.page.evaluate("document.documentElement.scrollWidth") == 390
    assert tab.page.evaluate("document.querySelector('.view').scrollWidth") <= 390
    expect(tab.page.locator("nav")).to_be_hidden()
    tab.page.get_by_role("button", name="Open the list of chats").click()
    tab.page.locator("nav a").click()
    tab.page.wait_for_function("() => !document.querySelector('.side').classList.contains('open')")


def test_scrolling_up_is_left_alone_while_an_answer_grows(server: Running, visit: Visit) -> None:
    server.engine.script = "\n\n".join(f"paragraph {n}" for n in range(120))
    server.engine.hold_at = 2 * 41  # words
    tab = visit()
    tab.ask("Tell me.")
    tab.wait_for_text("paragraph 40")
    end = "(v => v.scrollHeight - v.scrollTop - v.clientHeight)(document.querySelector('.view'))"
    tab.page.wait_for_function(f"() => {end} < 60")
    tab.page.hover(".view")
    tab.page.mouse.wheel(0, -100_000)
    # The browser scrolls some frames after the event; the top is where that is sure to be over.
    tab.page.wait_for_function("() => document.querySelector('.view').scrollTop === 0")
    server.engine.hold_at = None
    tab.wait("done")
    tab.settle()
    assert tab.page.evaluate("document.querySelector('.view').scrollTop") == 0
    tab.page.get_by_role("button", name="Jump to the newest message").click()
    tab.page.wait_for_function(f"() => {end} < 2")


def test_a_hostile_answer_runs_nothing_and_fetches_nothing(server: Running, visit: Visit) -> None:
    server.engine.script = HOSTILE
    tab = visit()
    asked: list[str] = []
    tab.page.on("request", lambda request: asked.append(request.url))
    tab.ask("Be evil")
    tab.wait("done")
    tab.page.evaluate("fetch('health')")  # what the answer fetched or ran came before
    tab.settle()
    assert tab.page.evaluate("window.hacked") is None
    assert tab.page.locator("article :is(img, script, svg[onload], iframe)").count() == 0
    assert not [url for url in asked if "evil" in url]
    hrefs = tab.page.eval_on_selector_all("article a", "links => links.map(({ href }) => href)")
    assert all(href.startswith("https://") for href in hrefs)


def test_nothing_of_the_hostile_corpus_runs_or_fetches(server: Running, visit: Visit) -> None:
    corpus: list[str] = json.loads(CORPUS.read_text())
    tab = visit()
    asked: list[str] = []
    tab.page.on("request", lambda request: asked.append(request.url))
    for part in (corpus[::2], corpus[1::2]):
        server.engine.script = "\n\n".join(part)
        tab.ask("\n".join(part))
        tab.page.wait_for_function(
            "t => [...document.querySelectorAll('.question')].at(-1)?.textContent.includes(t)",
            arg=part[-1],
        )
        tab.wait("done")
    tab.page.wait_for_selector("article math")
    tab.page.evaluate("fetch('health')")  # what the answers fetched or ran came before
    tab.settle()
    assert tab.page.evaluate("window.hacked") is None
    forbidden = "article :is(img, script, iframe, object, embed, svg[onload], form, style, link)"
    assert tab.page.locator(forbidden).count() == 0
    assert not [url for url in asked if "evil" in url]


def test_a_hostile_question_is_shown_as_text(visit: Visit) -> None:
    tab = visit()
    attack = "<img src=x onerror='window.hacked=1'> **bold**"
    tab.ask(attack)
    tab.wait("done")
    assert tab.page.inner_text(".question") == attack
    assert tab.page.evaluate("window.hacked") is None


def test_code_can_be_copied(server: Running, visit: Visit) -> None:
    server.engine.script = RICH
    tab = visit(permissions=["clipboard-read", "clipboard-write"])
    tab.ask("Code, please")
    tab.wait("done")
    tab.page.evaluate(HEAR_LABELS)  # the button says so for a moment only
    tab.page.get_by_role("button", name="Copy", exact=True).click()
    tab.page.wait_for_function("() => window.labels.includes('Copied')")
    copied = tab.page.evaluate("navigator.clipboard.readText()")
    assert copied == "def f(x: int) -> int:\n    return x  # comment"


def test_a_screen_reader_hears_the_beginning_and_the_end(server: Running, visit: Visit) -> None:
    server.engine.script, server.engine.hold_at = "word " * 60, 20
    tab = visit()
    status, answer = tab.page.locator("p[role=status]"), tab.page.locator("article")
    tab.ask("Hello")
    tab.wait("streaming")
    expect(status).to_have_text("Answering")
    expect(answer).to_have_attribute("aria-busy", "true")
    server.engine.hold_at = None
    tab.wait("done")
    expect(status).to_have_text("The answer is complete")
    expect(answer).to_have_attribute("aria-busy", "false")

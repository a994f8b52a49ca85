"""The pages' Content-Security-Policy: strict, the same in header and page, and kept by all that the
pages do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

import mmserve
from mmserve.server.page import POLICY
from tests.server.conftest import Running
from tests.web.conftest import Tab, picture

BUILT = Path(mmserve.__file__).parent / "webui"
PAGES = {"": "index.html", "kv": "kv.html"}
META = re.compile(r'http-equiv="Content-Security-Policy"\s+content="([^"]+)"')
RICH = """# Title

| a | b |
|:--|--:|
| 1 | 2 |

```python
x = 1
```

$e^{i\\pi} + 1 = 0$ and

$$\\frac{a}{b}$$
"""
HEAR = """
window.violations = [];
document.addEventListener('securitypolicyviolation', (event) =>
  window.violations.push(`${event.effectiveDirective} ${event.blockedURI} ${event.sample}`));
"""
# Each loaded when it is first opened, in both languages.
DIALOGS = [
    re.compile("^(Settings|设置)"),
    re.compile("^(Keyboard shortcuts|键盘快捷键)"),
    re.compile("^(Pictures of this chat|本对话的图片)"),
]
# What an attacker who got markup into the page would try.
ATTACK = """() => {
  const put = (tag, set) => {
    const element = document.createElement(tag);
    set(element);
    document.body.append(element);
  };
  put('script', (e) => (e.textContent = 'window.hacked = 1'));
  put('style', (e) => (e.textContent = 'body { color: red }'));
  put('img', (e) => (e.src = 'https://evil.example/leak.png'));
  put('iframe', (e) => (e.src = 'https://evil.example/'));
  put('base', (e) => (e.href = 'https://evil.example/'));
  fetch('https://evil.example/').catch(() => {});
  // Later, because the browser lets a debugger's own call do it.
  setTimeout(() => new Function('window.hacked = 1')());
}"""
Visit = Callable[..., Tab]
FORBIDDEN = ("script-src", "style-src-elem", "img-src", "frame-src", "connect-src", "base-uri")


def policy(text: str) -> dict[str, str]:
    return dict(part.strip().split(" ", 1) for part in text.split(";"))


@pytest.mark.parametrize("path", PAGES)
def test_the_header_is_the_policy_on_every_page(server: Running, path: str) -> None:
    answer = httpx.get(f"{server.url}/{path}")
    assert answer.status_code == 200 and "text/html" in answer.headers["content-type"]
    assert policy(answer.headers["content-security-policy"]) == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", PAGES.values())
def test_the_built_page_says_the_same_for_whoever_serves_it_otherwise(name: str) -> None:
    found = META.search((BUILT / name).read_text())
    assert found is not None
    # What a page is framed by it cannot say itself.
    assert policy(found[1]) | {"frame-ancestors": "'none'"} == POLICY


@pytest.mark.parametrize("name", PAGES.values())
def test_the_built_page_has_nothing_inline(name: str) -> None:
    html = (BUILT / name).read_text()
    scripts = re.findall(r"<script\b([^>]*)>(.*?)</script>", html, re.DOTALL)
    assert scripts and all('src="./' in tag and not body.strip() for tag, body in scripts)
    assert "<style" not in html and not re.search(r"\son\w+=", html)


def test_the_policy_is_strict() -> None:
    assert POLICY["default-src"] == "'none'"
    for name, sources in POLICY.items():
        allowed = set(sources.split())
        assert not allowed & {"*", "http:", "https:", "'unsafe-eval'", "'wasm-unsafe-eval'"}, name
        assert name == "style-src-attr" or "'unsafe-inline'" not in allowed, name
        assert not allowed & {"blob:", "data:"} or name == "img-src", name


def watched(visit: Visit, url: str, **options: Any) -> Tab:
    """A tab that notes what its policy forbids, from the first script on."""
    tab = visit(url, **options)
    tab.page.add_init_script(HEAR)
    tab.page.reload()
    return tab


def violations(page: Page) -> list[str]:
    found: list[str] = page.evaluate("window.violations")
    return found


@pytest.mark.browser
@pytest.mark.parametrize("options", [{}, {"color_scheme": "dark", "locale": "zh-CN"}])
def test_a_chat_with_all_kinds_of_content_violates_nothing(
    server: Running, visit: Visit, options: dict[str, Any]
) -> None:
    server.engine.script = RICH
    tab = watched(visit, server.url, **options)
    tab.page.wait_for_selector("textarea")
    tab.drop(("a.png", picture("red")))
    tab.answered("Show me all")
    tab.page.wait_for_selector(".hljs-keyword, .hljs-number, pre code")
    tab.page.get_by_role("button", name=re.compile("^(View|查看) (Picture|图片) 1")).click()
    tab.settle()
    tab.page.keyboard.press("Escape")
    for name in DIALOGS:
        tab.page.get_by_role("button", name=name).first.click()
        expect(tab.page.get_by_role("dialog", name=name)).to_be_visible()
        tab.page.keyboard.press("Escape")
    assert violations(tab.page) == []
    tab.page.reload()
    tab.page.wait_for_selector("article")
    tab.settle()
    assert violations(tab.page) == []


@pytest.mark.browser
def test_the_kv_view_violates_nothing(server: Running, visit: Visit) -> None:
    server.http().post("/v1/responses", json={"input": "hello"}).raise_for_status()
    tab = watched(visit, f"{server.url}/kv", ready="h1")
    row = tab.page.locator("section[data-kind=text] tbody button").first
    row.click()
    expect(row).to_have_attribute("aria-pressed", "true")
    tab.page.locator("section[data-kind=text] canvas").click(position={"x": 5, "y": 5})
    expect(tab.page.locator("svg rect").first).to_be_attached()
    assert violations(tab.page) == []


@pytest.mark.browser
@pytest.mark.parametrize("path", PAGES)
def test_what_is_put_into_a_page_neither_runs_nor_calls_out(
    server: Running, visit: Visit, path: str
) -> None:
    tab = watched(visit, f"{server.url}/{path}", ready="#app *")
    tab.page.evaluate(ATTACK)
    # Text as a script is forbidden twice: in an element, and made by a function.
    tab.page.wait_for_function("n => window.violations.length > n", arg=len(FORBIDDEN))
    heard = " ".join(violations(tab.page))
    assert all(name in heard for name in (*FORBIDDEN, "eval")), heard
    assert tab.page.evaluate("window.hacked") is None
    tab.errors.clear()  # the browser tells of each in the console

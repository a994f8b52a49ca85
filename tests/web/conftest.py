"""Chromium on the built page, served by the real server over the fake engine.

Owns starting both, putting files into the page, and failing a test whose page logged an error.
"""

from __future__ import annotations

import base64
import io
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    expect,
    sync_playwright,
)

from mmserve.config import ServerConfig

# Appended, so that nothing of the root can shadow an installed package.
sys.path.append(str(Path(__file__).parents[2]))

from tests.server.conftest import PATIENCE_S, Running, start
from tests.server.fake_engine import FakeEngine
from tests.server.proxy import CuttingProxy

expect.set_options(timeout=PATIENCE_S * 1000)

ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DROP = """([name, type, data]) => {
  const transfer = new DataTransfer();
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  transfer.items.add(new File([bytes], name, { type }));
  return transfer;
}"""
PASTE = """(data) => document.querySelector('textarea').dispatchEvent(
  new ClipboardEvent('paste', { clipboardData: data, bubbles: true, cancelable: true }))"""
# Reads the page's database beside the page: (table, predicate over its rows) => Promise<boolean>.
STORED = """(table, holds) => new Promise((resolve) => {
  const opening = indexedDB.open('mmserve');
  opening.onsuccess = () => {
    const database = opening.result;
    const reading = database.transaction(table).objectStore(table).getAll();
    reading.onsuccess = () => {
      database.close();
      resolve(holds(reading.result));
    };
  };
})"""
# A transition that has begun holds colours and places that are nobody's intention.
SETTLED = """() => Promise.all(document.getAnimations()
  .filter(({ effect }) => effect.getComputedTiming().endTime !== Infinity)
  .map(({ finished }) => finished.catch(() => undefined)))"""
TWO_FRAMES = "() => new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(r)))"
# What a browser logs by itself when the network or a key fails; the page cannot prevent it.
NETWORK_NOISE = re.compile(r"WebSocket connection to|Failed to load resource|net::ERR_")


@dataclass
class Tab:
    """One page with the gestures the tests share.

    A browser handles an input some time after it was sent, so nothing is read once right after a
    gesture: each waits for what it causes, and tests `expect` the rest.
    """

    page: Page
    errors: list[str] = field(default_factory=list)

    def _transfer(self, name: str, data: bytes, kind: str = "image/png") -> Any:
        """What a browser says of files that are dropped or pasted."""
        return self.page.evaluate_handle(DROP, [name, kind, base64.b64encode(data).decode()])

    def paste(self, name: str, data: bytes) -> None:
        self.page.evaluate(PASTE, self._transfer(name, data))

    def drop(self, *files: tuple[str, bytes], kind: str = "image/png") -> None:
        """Drop files on the page one after the other; returns when all are shown."""
        for name, data in files:
            transfer = self._transfer(name, data, kind)
            self.page.dispatch_event("body", "drop", {"dataTransfer": transfer})
        self.page.wait_for_function(
            "n => document.querySelectorAll('.tray li:not([data-state=uploading])').length >= n",
            arg=len(files),
        )

    def ask(self, text: str) -> None:
        self.page.fill("textarea", text)
        self.page.press("textarea", "Enter")

    def wait(self, status: str) -> str:
        """The last answer's text once it has this status."""
        answer = self.page.locator(f"article[data-status={status}]").last
        answer.wait_for()
        self.page.wait_for_function(
            "s => [...document.querySelectorAll('article')].at(-1).dataset.status === s",
            arg=status,
        )
        markdown = answer.locator(".markdown")
        return markdown.inner_text() if markdown.count() else ""

    def answered(self, text: str) -> str:
        self.ask(text)
        self.page.wait_for_function(
            "t => [...document.querySelectorAll('.question')].at(-1)?.textContent === t", arg=text
        )
        return self.wait("done")

    def new_chat(self) -> None:
        self.page.get_by_role("button", name="New chat").first.click()
        self.page.wait_for_selector(".empty")

    def wait_until_stored(self, table: str, holds: str) -> None:
        """Until the database has what a reload shall find; `holds` is JavaScript over the rows."""
        self.page.wait_for_function(f"() => ({STORED})('{table}', {holds})")

    def settle(self) -> None:
        """Until every transition has ended and what scrolls after a change has scrolled."""
        self.page.evaluate(SETTLED)
        self.page.evaluate(TWO_FRAMES)

    def wait_for_text(self, part: str) -> None:
        self.page.wait_for_function(
            "t => [...document.querySelectorAll('article')].at(-1)?.textContent.includes(t)",
            arg=part,
        )


def picture(color: str, size: tuple[int, int] = (48, 48)) -> bytes:
    """A PNG of one colour; `size` is (width, height) in pixels."""
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, "PNG")
    return buffer.getvalue()


# By module: while Playwright runs, no other event loop can in its thread, and other tests may
# follow.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("Chromium is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, headless=True, args=ARGS, timeout=300_000
        )
        yield browser
        browser.close()


@pytest.fixture
def launch() -> Iterator[Callable[..., Running]]:
    """Start servers with their own engine and settings; all are stopped at the end."""
    stops: list[Callable[[], None]] = []

    def begin(engine: FakeEngine | None = None, **settings: Any) -> Running:
        running, stop = start(ServerConfig(port=0, **settings), engine or FakeEngine())
        stops.append(stop)
        return running

    yield begin
    for stop in stops:
        stop()


@pytest.fixture
def server(launch: Callable[..., Running]) -> Running:
    return launch(FakeEngine())


@pytest.fixture
def proxy(server: Running) -> Iterator[CuttingProxy]:
    with CuttingProxy(server.url) as cutter:
        yield cutter


@pytest.fixture
def visit(chromium: Browser, server: Running) -> Iterator[Callable[..., Tab]]:
    """Open the page in a fresh browser profile; a console error fails the test."""
    contexts: list[BrowserContext] = []
    tabs: list[Tab] = []

    def begin(
        url: str | None = None,
        *,
        ready: str = "textarea",
        quiet_network: bool = True,
        **options: Any,
    ) -> Tab:
        context = chromium.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        context.set_default_timeout(PATIENCE_S * 1000)
        tab = Tab(context.new_page())
        contexts.append(context)
        tabs.append(tab)

        def hear(message: ConsoleMessage) -> None:
            noise = not quiet_network and NETWORK_NOISE.search(message.text)
            if message.type == "error" and not noise:
                tab.errors.append(message.text)

        tab.page.on("console", hear)
        tab.page.on("pageerror", lambda error: tab.errors.append(str(error)))
        tab.page.goto(url or server.url)
        tab.page.wait_for_selector(ready)
        return tab

    yield begin
    for context in contexts:
        context.close()
    assert [error for tab in tabs for error in tab.errors] == []

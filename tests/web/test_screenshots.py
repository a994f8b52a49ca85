"""The pictures of the chat page in the README and docs, made with the default model.

Run with MMSERVE_PICTURES=1; without it nothing here runs, as the model answers for some seconds.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw, ImageFont
from playwright.sync_api import Page, expect

from tests.web.conftest import Tab

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif("MMSERVE_PICTURES" not in os.environ, reason="MMSERVE_PICTURES is not set"),
]

Visit = Callable[..., Tab]
DOCS = Path(__file__).parents[2] / "docs"
MOST = 150 * 1024  # bytes of a picture
COLORS = 128
SIDE = 448


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of its own process with the default model."""
    command = [sys.executable, "-m", "mmserve", "serve", "--port", "0", "--data-dir", "none"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield next(line.split()[-1] for line in process.stdout if "ready" in line)
    finally:
        process.terminate()
        process.wait(60)


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def shapes() -> bytes:
    """As the page's own sample; drawn larger, so that its edges are smooth."""
    image = Image.new("RGB", (4 * SIDE, 4 * SIDE), "white")
    draw = ImageDraw.Draw(image)
    draw.ellipse((264, 360, 728, 824), fill="#d62f2f")
    draw.rectangle((1064, 376, 1496, 808), fill="#2458d3")
    draw.polygon(((896, 936), (1176, 1416), (616, 1416)), fill="#1e9e4a")
    return png(image.resize((SIDE, SIDE), Image.Resampling.LANCZOS))


def written(text: str, ink: str, ground: str) -> bytes:
    image = Image.new("RGB", (SIDE, SIDE), ground)
    font = ImageFont.load_default(size=120)
    ImageDraw.Draw(image).text((SIDE / 2, SIDE / 2), text, fill=ink, font=font, anchor="mm")
    return png(image)


def keep(page: Page, name: str) -> None:
    """As few colours as nobody sees; the file is committed."""
    shot = Image.open(io.BytesIO(page.screenshot()))
    shot.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(
        DOCS / f"{name}.png", optimize=True
    )
    assert (DOCS / f"{name}.png").stat().st_size <= MOST


def ask(tab: Tab, question: str, *files: tuple[str, bytes]) -> None:
    if files:
        tab.drop(*files)
        tab.page.wait_for_function(
            "n => document.querySelectorAll('.tray [data-warm=true]').length === n",
            arg=len(files),
        )
    tab.page.fill("textarea", question)
    tab.page.locator("form button.go").click()
    expect(tab.page.locator(".question").last).to_have_text(question)
    tab.wait("done")


def chat(tab: Tab) -> None:
    ask(tab, "What shape is green?", ("shapes.png", shapes()))
    lemon = written("lemon", "#0b6b8a", "#f3ead9")
    number = written("4827", "#c2372e", "#ffffff")
    ask(tab, "What does image 2 say?", ("word.png", lemon), ("number.png", number))
    tab.settle()


def other_chats(tab: Tab) -> None:
    for question in ("Is there a blue circle?", "How many shapes are there?"):
        ask(tab, question, ("shapes.png", shapes()))
        tab.page.locator(".new").click()
        tab.page.wait_for_selector(".empty")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_chat(url: str, visit: Visit, scheme: str) -> None:
    size = {"width": 1180, "height": 860}
    tab = visit(url, color_scheme=scheme, viewport=size)
    other_chats(tab)
    chat(tab)
    name = "page" if scheme == "light" else "page-dark"
    if scheme == "dark":
        tab.page.get_by_role("button", name="Pictures of this chat").click()
        rows = tab.page.get_by_role("dialog").get_by_role("listitem")
        expect(rows).to_have_count(3)
        tab.settle()
    keep(tab.page, name)


def test_the_chat_on_a_phone(url: str, visit: Visit) -> None:
    phone: dict[str, Any] = {"viewport": {"width": 390, "height": 780}, "device_scale_factor": 1.5}
    tab = visit(url, locale="zh-CN", has_touch=True, is_mobile=True, **phone)
    chat(tab)
    keep(tab.page, "page-phone")

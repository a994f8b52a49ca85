"""The KV view in Chromium, over a real engine of a tiny model: what the pools hold is seen, read,
clicked and forgotten, and shown to nobody else."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from mmserve.config import ServerConfig
from mmserve.engine.async_engine import AsyncEngine
from mmserve.engine.engine import Engine
from tests.engine.tiny import tiny_config, tiny_model
from tests.server.conftest import Running, data_url, eventually, start
from tests.web.conftest import Tab, picture
from tests.web.test_look import PHONE, violations

pytestmark = pytest.mark.browser

Visit = Callable[..., Tab]
Serve = Callable[..., Running]
ADMIN = "admin-key"
SHOWN = Path(__file__).parents[2] / "docs" / "kv-view.png"


@pytest.fixture
def serve() -> Iterator[Serve]:
    stops: list[Callable[[], None]] = []

    def begin(**settings: Any) -> Running:
        config = tiny_config(text_pages=400, vision_pages=120)
        engine = AsyncEngine(config, lambda config: Engine(config, tiny_model(1600)))
        running, stop = start(ServerConfig(port=0, **settings), cast(Any, engine))
        stops.append(stop)
        assert eventually(lambda: engine.status == "ok")
        return running

    yield begin
    for stop in stops:
        stop()


def ask(server: Running, *colors: str, text: str = "Tell me", previous: str | None = None) -> str:
    images = [{"type": "input_image", "image_url": data_url(picture(c))} for c in colors]
    content = [*images, {"type": "input_text", "text": text}]
    body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 6}
    answer = server.http().post("/v1/responses", json={**body, "previous_response_id": previous})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def look(visit: Visit, server: Running, **options: Any) -> Tab:
    tab = visit(f"{server.url}/kv", ready="h1", **options)
    expect(tab.page.locator(".state")).to_have_attribute("data-state", "open")
    return tab


def begin_and_stop(chat: Tab, question: str) -> None:
    """The tiny model would speak until its context is full."""
    chat.ask(question)
    chat.wait("streaming")
    chat.page.keyboard.press("Escape")
    chat.wait("stopped")


def pool(page: Page, kind: str) -> Any:
    return page.locator(f"section[data-kind={kind}]")


def click_page(page: Page, kind: str, number: int) -> None:
    """On a map of cells as large as they get."""
    canvas = pool(page, kind).locator("canvas")
    canvas.click(position={"x": 14 * number + 6, "y": 6})


def test_a_picture_is_asked_about_seen_in_the_pool_forgotten_and_gone(
    serve: Serve, visit: Visit
) -> None:
    server = serve()
    chat = visit(server.url)
    chat.drop(("red.png", picture("red")))
    begin_and_stop(chat, "What is it?")
    tab = look(visit, server)
    page, details = tab.page, tab.page.locator(".details")
    rows = pool(page, "vision").locator("tbody tr")
    expect(rows).to_have_count(1)
    expect(details).to_contain_text("Click a page")
    click_page(page, "vision", 1)
    expect(details).to_contain_text("Page 1")
    expect(details).to_contain_text("ready")
    expect(rows.first.get_by_role("button")).to_have_attribute("aria-pressed", "true")
    session = details.locator("dd.id").first.inner_text()
    assert session.startswith("resp_")
    expect(pool(page, "text").locator("tbody")).to_contain_text(session[5:13])
    page.get_by_role("button", name="Forget this image").click()
    page.get_by_role("button", name="Forget it?").click()
    expect(rows).to_have_count(0)
    expect(details).to_contain_text("The image has left the pool.")
    expect(details).to_contain_text("Page 1 · Free")
    begin_and_stop(chat, "And now?")
    expect(rows).to_have_count(1)  # whoever shows it again has it computed


def test_an_answer_is_seen_while_it_is_written(serve: Serve, visit: Visit) -> None:
    server = serve()
    tab = look(visit, server)
    expect(pool(tab.page, "text")).to_contain_text("Nothing is held.")
    first = ask(server, "red")
    expect(pool(tab.page, "text").locator("tbody tr")).not_to_have_count(0)
    ask(server, "blue", previous=first)
    expect(pool(tab.page, "vision").locator("tbody tr")).to_have_count(2)
    sessions = pool(tab.page, "vision").locator("tbody td.id")
    expect(sessions).to_have_text([first[5:13]] * 2)
    expect(tab.page.locator("svg rect")).not_to_have_count(0)


def test_pages_are_read_by_keys_and_heard(serve: Serve, visit: Visit) -> None:
    server = serve()
    ask(server, "red")
    page = look(visit, server).page
    pages = page.get_by_role("application", name="Map of the pages, Image pool")
    said = pool(page, "vision").locator("p[role=status]")
    pages.focus()
    page.keyboard.press("ArrowRight")
    expect(said).to_contain_text("Page 1: Image ")
    page.keyboard.press("End")
    expect(said).to_have_text("Page 119: free")
    page.keyboard.press("Home")
    expect(said).to_contain_text("Page 0: Image ")
    pool(page, "text").locator("tbody button").first.focus()
    page.keyboard.press("Enter")
    expect(page.locator(".details")).to_contain_text("Branch")


def test_the_chat_page_loads_nothing_of_the_view(serve: Serve, visit: Visit) -> None:
    server = serve()
    tab = visit(server.url)
    asked: list[str] = []
    tab.page.on("request", lambda request: asked.append(request.url))
    tab.page.reload()
    tab.page.wait_for_selector("textarea")
    scripts = [url for url in asked if url.endswith(".js")]
    assert scripts and not [url for url in asked if "/kv" in url]


def test_the_socket_is_closed_while_the_tab_is_hidden(serve: Serve, visit: Visit) -> None:
    server = serve()
    page = look(visit, server).page
    hide = """hidden => {
      Object.defineProperty(document, 'hidden', { configurable: true, get: () => hidden });
      document.dispatchEvent(new Event('visibilitychange'));
    }"""
    page.evaluate(hide, True)
    expect(page.locator(".state")).to_have_attribute("data-state", "paused")
    assert eventually(lambda: not server.services.sockets)
    page.evaluate(hide, False)
    expect(page.locator(".state")).to_have_attribute("data-state", "open")
    ask(server, "red")
    expect(pool(page, "vision").locator("tbody tr")).to_have_count(1)


def test_the_view_asks_for_the_admin_key(serve: Serve, visit: Visit) -> None:
    server = serve(api_keys=("user",), admin_keys=(ADMIN,))
    tab = visit(f"{server.url}/kv", ready="form", quiet_network=False)
    form = tab.page.locator("form")
    expect(form).to_contain_text("An admin key is needed")
    assert violations(tab) == []
    for key in ("wrong", "user"):
        form.get_by_label("Admin key").fill(key)
        form.get_by_role("button").click()
        expect(form.get_by_role("alert")).to_have_text("The key was not accepted.")
    form.get_by_label("Admin key").fill(ADMIN)
    form.get_by_role("button").click()
    expect(tab.page.locator(".state")).to_have_attribute("data-state", "open")
    expect(pool(tab.page, "text")).to_contain_text("400 pages")
    tab.page.reload()
    expect(tab.page.locator(".state")).to_have_attribute("data-state", "open")


def test_a_server_with_users_keys_alone_shows_nothing(serve: Serve, visit: Visit) -> None:
    server = serve(api_keys=("user",))
    tab = visit(f"{server.url}/kv", ready="form", quiet_network=False)
    expect(tab.page.locator("form")).to_contain_text("--admin-key")
    assert violations(tab) == []


@pytest.mark.parametrize(
    "options",
    [{}, {"color_scheme": "dark"}, {"locale": "zh-CN"}, PHONE],
    ids=["light", "dark", "zh-CN", "phone"],
)
def test_axe_finds_nothing_wrong(serve: Serve, visit: Visit, options: dict[str, Any]) -> None:
    server = serve()
    first = ask(server, "red", "blue")
    ask(server, "green", previous=first)
    tab = look(visit, server, **options)
    assert violations(tab) == []
    pool(tab.page, "vision").locator("tbody button").first.click()
    expect(tab.page.locator(".forget")).to_be_visible()
    assert violations(tab) == []
    if options is PHONE:
        assert tab.page.evaluate("document.documentElement.scrollWidth") == 390


def test_the_view_speaks_the_language_that_was_chosen(serve: Serve, visit: Visit) -> None:
    tab = look(visit, serve(), locale="zh-CN")
    expect(tab.page.locator("html")).to_have_attribute("lang", "zh-CN")
    expect(tab.page.locator("h1")).to_have_text("KV 缓存池")
    tab.page.get_by_role("button", name="English").click()
    expect(tab.page.locator("h1")).to_have_text("KV pools")
    tab.page.reload()
    expect(tab.page.locator("h1")).to_have_text("KV pools")


@pytest.mark.skipif("MMSERVE_PICTURES" not in os.environ, reason="MMSERVE_PICTURES is not set")
def test_the_picture_in_the_docs_is_made(serve: Serve, visit: Visit) -> None:
    server = serve()
    colors = ("red", "blue", "green", "orange", "purple", "teal", "black", "pink")
    for number, color in enumerate(colors):
        previous: str | None = None
        for turn in range(2 + number % 3):
            shown = [color] if turn == 0 else [colors[(number + turn) % 8]] if turn == 1 else []
            text = f"Question {turn} about {color} things"
            previous = ask(server, *shown, text=text, previous=previous)
    tab = look(visit, server)
    pool(tab.page, "vision").locator("tbody button").nth(2).click()
    tab.page.locator("body").click(position={"x": 5, "y": 200})
    tab.settle()
    shot = Image.open(io.BytesIO(tab.page.screenshot(full_page=True)))
    shot.convert("RGB").quantize(96).save(SHOWN, optimize=True)
    assert SHOWN.stat().st_size < 150 * 1024

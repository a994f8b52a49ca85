"""Turns in the page: pictures in, words out, and what survives a reload."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import expect

from mmserve.prompt import ImagePart, Message, TextPart, TokensPart
from mmserve.request import TokenEvent
from tests.server.conftest import Running, eventually
from tests.server.fake_engine import FakeGeneration
from tests.web.conftest import Tab, picture

pytestmark = pytest.mark.browser

Visit = Callable[..., Tab]

WORDS = [f"word{n}" for n in range(150)]


def text_of(part: object) -> str:
    """The text of a part; an answer's tokens are UTF-8 bytes in the fake engine."""
    if isinstance(part, TokensPart):
        return bytes(part.token_ids).decode()
    return part.text if isinstance(part, TextPart) else ""


def shape_of(messages: list[Message]) -> list[tuple[str, int, str]]:
    """(role, number of images, text) of each message."""
    return [
        (
            message.role,
            sum(isinstance(part, ImagePart) for part in message.parts),
            "".join(text_of(part) for part in message.parts),
        )
        for message in messages
    ]


def test_two_dropped_pictures_are_asked_about_and_the_chat_goes_on_after_a_reload(
    server: Running, visit: Visit
) -> None:
    tab = visit()
    tab.drop(("a.png", picture("red")), ("b.png", picture("blue")))
    first = tab.answered("Which is red?")
    assert re.fullmatch(r"you said: \[\w{8}\] \[\w{8}\] Which is red\?", first)
    assert shape_of(server.engine.prompts[-1]) == [("user", 2, "Which is red?")]

    tab.wait_until_stored("turns", "turns => turns[0]?.answer.status === 'done'")
    tab.wait_until_stored("pictures", "pictures => pictures.length === 2")
    tab.page.reload()
    assert tab.wait("done") == first
    expect(tab.page.locator(".pictures img")).to_have_count(2)
    loaded = "images => images.every(({ naturalWidth }) => naturalWidth === 48)"
    tab.page.wait_for_function(f"() => ({loaded})([...document.querySelectorAll('.pictures img')])")

    assert tab.answered("And the other?") == "you said: And the other?"
    assert shape_of(server.engine.prompts[-1]) == [
        ("user", 2, "Which is red?"),
        ("assistant", 0, first),
        ("user", 0, "And the other?"),
    ]


def test_attached_pictures_are_read_ahead_before_anything_is_asked(
    server: Running, visit: Visit
) -> None:
    tab = visit()
    tab.drop(("a.png", picture("red")), ("b.png", picture("blue")))
    assert eventually(lambda: [*map(shape_of, server.engine.prompts)][-1:] == [[("user", 2, "")]])
    assert tab.page.locator("article").count() == 0


def test_a_reload_in_mid_answer_resumes_the_same_response(server: Running, visit: Visit) -> None:
    server.engine.script, server.engine.hold_at = " ".join(WORDS), 41
    tab = visit()
    tab.ask("Tell me.")
    tab.wait_for_text("word40")
    tab.wait_until_stored("turns", "turns => turns[0]?.answer.responseId")
    tab.page.reload()
    tab.wait_for_text("word40")
    server.engine.hold_at = None
    assert tab.wait("done") == server.engine.script
    assert len(server.engine.prompts) == 1


def test_stop_keeps_the_text_so_far_and_the_chat_goes_on(server: Running, visit: Visit) -> None:
    server.engine.script, server.engine.hold_at = " ".join(WORDS), 10
    tab = visit()
    tab.ask("Tell me.")
    tab.wait_for_text("word9")
    tab.page.get_by_role("button", name="Stop").click()
    partial = tab.wait("stopped")
    assert partial == " ".join(WORDS[:10])
    assert server.idle()

    server.engine.script, server.engine.hold_at = None, None
    assert tab.answered("Go on.") == "you said: Go on."
    assert shape_of(server.engine.prompts[-1])[1] == ("assistant", 0, partial)


def test_escape_stops_an_answer(server: Running, visit: Visit) -> None:
    server.engine.script, server.engine.hold_at = " ".join(WORDS), 10
    tab = visit()
    tab.ask("Tell me.")
    tab.wait_for_text("word9")
    tab.page.keyboard.press("Escape")
    tab.wait("stopped")
    assert server.idle()


def test_a_refused_turn_is_a_sentence_and_can_be_tried_again(server: Running, visit: Visit) -> None:
    tab = visit()
    server.engine.queue_full = True
    tab.ask("Hello?")
    tab.wait("failed")
    assert "The server is busy. Try again in a moment." in tab.page.inner_text(".failed")
    server.engine.queue_full = False
    tab.page.get_by_role("button", name="Try again").click()
    assert tab.wait("done") == "you said: Hello?"


def test_an_engine_that_trips_in_mid_answer_is_a_sentence(server: Running, visit: Visit) -> None:
    server.engine.script = "so far so crash"
    tab = visit()
    tab.ask("Hello?")
    tab.wait("failed")
    assert tab.page.locator(".failed p").inner_text() != ""
    assert "so far so" in tab.page.inner_text("article")


def test_figures_stand_under_the_answer(server: Running, visit: Visit) -> None:
    tab = visit()
    tab.drop(("a.png", picture("red")))
    tab.answered("What color?")
    stats = tab.page.inner_text(".stats")
    for figure in (r"\d+ prompt", r"\d+ cached", "16 image", r"\d+ m?s(ec)? to first token"):
        assert re.search(figure, stats), (figure, stats)


def test_chats_are_listed_opened_and_deleted(server: Running, visit: Visit) -> None:
    tab = visit()
    tab.answered("First chat")
    tab.new_chat()
    tab.answered("Second chat")
    links = tab.page.locator("nav a")
    expect(links).to_have_text(["Second chat", "First chat"])
    links.last.click()
    tab.page.wait_for_function(
        "() => document.querySelector('.question')?.textContent === 'First chat'"
    )

    row = tab.page.locator("nav li", has_text="First chat")
    row.get_by_role("button", name="More about “First chat”").click()
    row.get_by_role("button", name="Delete", exact=True).click()
    expect(links).to_have_count(2)
    row.get_by_role("button", name="Really delete?").click()
    tab.page.wait_for_selector(".empty")
    tab.wait_until_stored("conversations", "chats => chats.length === 1")
    tab.page.reload()
    tab.page.wait_for_selector(".empty")
    expect(links).to_have_text(["Second chat"])


def test_an_answer_goes_on_while_another_chat_is_read(server: Running, visit: Visit) -> None:
    server.engine.script, server.engine.hold_at = " ".join(WORDS), 4
    tab = visit()
    tab.ask("Slow one")
    tab.wait_for_text("word3")
    tab.new_chat()
    server.engine.hold_at = None
    assert server.idle()
    server.engine.script = None
    assert tab.answered("Other one") == "you said: Other one"
    tab.page.locator("nav a").last.click()
    expect(tab.page.locator(".question")).to_have_text("Slow one")
    assert tab.wait("done") == " ".join(WORDS)


def test_a_sample_picture_needs_no_file(server: Running, visit: Visit) -> None:
    tab = visit()
    tab.page.get_by_role("button", name="Three shapes").click()
    tab.page.wait_for_selector("[data-state=ready]")
    expect(tab.page.locator("textarea")).to_have_value("How many shapes are there?")
    expect(tab.page.locator("textarea")).to_be_focused()
    tab.page.keyboard.press("Enter")
    assert tab.wait("done").endswith("How many shapes are there?")
    assert shape_of(server.engine.prompts[-1])[0][1] == 1


def test_a_picture_read_from_the_cache_is_marked(
    server: Running, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = FakeGeneration._end

    def hit(self: FakeGeneration, *args: Any) -> TokenEvent:
        event = end(self, *args)
        assert event.usage is not None
        return replace(event, usage=replace(event.usage, vision_hits=1, vision_misses=0))

    tab = visit()
    tab.drop(("a.png", picture("red")))
    tab.answered("What color?")
    assert tab.page.locator(".badge").count() == 0
    monkeypatch.setattr(FakeGeneration, "_end", hit)
    tab.answered("Are you sure?")
    assert tab.page.inner_text(".badge") == "picture already known"

"""What the page does when the network, the server's memory or the key fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from tests.server.conftest import KEY, Running, eventually
from tests.server.fake_engine import FakeEngine
from tests.server.proxy import CuttingProxy
from tests.web.conftest import Tab, picture
from tests.web.test_conversation import shape_of

pytestmark = pytest.mark.browser

Visit = Callable[..., Tab]
Launch = Callable[..., Running]


def test_an_answer_cut_twice_ends_with_the_same_text(
    server: Running, proxy: CuttingProxy, visit: Visit
) -> None:
    server.engine.script, server.engine.hold_at = " ".join(f"字{n}" for n in range(300)), 0
    tab = visit(proxy.url, quiet_network=False)
    tab.ask("Tell me.")
    for mark in (40, 120):
        server.engine.hold_at = mark + 1
        tab.wait_for_text(f"字{mark}")
        proxy.cut()
    server.engine.hold_at = None
    assert tab.wait("done") == server.engine.script
    assert len(server.engine.prompts) == 1
    assert tab.answered("Again.") == server.engine.script


def test_an_outage_is_shown_and_survived(
    server: Running, proxy: CuttingProxy, visit: Visit
) -> None:
    server.engine.script, server.engine.hold_at = " ".join(f"word{n}" for n in range(100)), 21
    tab = visit(proxy.url, quiet_network=False)
    tab.ask("Tell me.")
    tab.wait_for_text("word20")
    proxy.refusing = True
    proxy.cut()
    tab.page.wait_for_selector("[data-link=retrying]")
    assert eventually(lambda: proxy.num_refused >= 4)
    assert tab.page.locator("article[data-status=streaming]").count() == 1
    proxy.refusing = False
    server.engine.hold_at = None
    assert tab.wait("done") == server.engine.script
    tab.page.wait_for_selector(".banner", state="detached")


def test_a_turn_asked_during_an_outage_is_sent_afterwards(
    server: Running, proxy: CuttingProxy, visit: Visit
) -> None:
    tab = visit(proxy.url, quiet_network=False)
    tab.answered("One")
    proxy.refusing = True
    proxy.cut()
    tab.page.wait_for_selector("[data-link=retrying]")
    tab.ask("Two")
    tab.wait("waiting")
    proxy.refusing = False
    assert tab.wait("done") == "you said: Two"


def test_a_server_that_forgot_everything_is_told_the_whole_chat_again(
    server: Running, proxy: CuttingProxy, visit: Visit, launch: Launch
) -> None:
    tab = visit(proxy.url, quiet_network=False)
    tab.drop(("a.png", picture("red")))
    first = tab.answered("What is it?")
    fresh = launch(FakeEngine())
    proxy.target = fresh.url
    proxy.cut()
    tab.answered("And now?")
    assert shape_of(fresh.engine.prompts[-1]) == [
        ("user", 1, "What is it?"),
        ("assistant", 0, first),
        ("user", 0, "And now?"),
    ]


def test_a_loading_model_is_waited_for(server: Running, visit: Visit) -> None:
    server.engine.status = "loading"
    tab = visit(quiet_network=False)
    tab.page.wait_for_selector("[data-link=loading]")
    tab.ask("Hello")
    server.engine.status = "ok"
    assert tab.wait("done") == "you said: Hello"


def test_a_key_is_asked_for_once(launch: Launch, visit: Visit) -> None:
    locked = launch(FakeEngine(), api_keys=(KEY,))
    tab = visit(locked.url, quiet_network=False)
    tab.page.get_by_label("API key").fill("wrong")
    tab.page.get_by_role("button", name="Use this key").click()
    tab.page.get_by_text("The key was not accepted.").wait_for()
    tab.page.get_by_label("API key").fill(KEY)
    tab.page.get_by_role("button", name="Use this key").click()
    tab.page.wait_for_selector("dialog", state="detached")
    tab.drop(("a.png", picture("red")))
    assert tab.answered("Hello").endswith("Hello")
    tab.wait_until_stored("turns", "turns => turns[0]?.answer.status === 'done'")
    tab.page.reload()
    assert tab.answered("Again") == "you said: Again"
    expect(tab.page.locator("dialog")).to_have_count(0)

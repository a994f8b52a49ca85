"""A chat of 500 turns: what is near is drawn, and the reader's place holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.server.conftest import Running
from tests.server.fake_engine import FakeEngine, FakeInfo
from tests.web.conftest import Tab

pytestmark = pytest.mark.browser

Visit = Callable[..., Tab]
TURNS = 500
FEW = 40  # turns in the document at a time

SCROLL = """async (pixels) => {
  const view = document.querySelector('.view');
  const most = { turns: 0, frames: 0, slow: 0 };
  const frame = () => new Promise(requestAnimationFrame);
  let last = await frame();
  const begun = last;
  while (view.scrollTop > 0) {
    view.scrollTop -= pixels;
    const now = await frame();
    most.frames++;
    if (now - last > 25) most.slow++;
    last = now;
    most.turns = Math.max(most.turns, document.querySelectorAll('article').length);
  }
  most.perSecond = Math.round(most.frames * 1000 / (last - begun));
  return most;
}"""


def long_chat() -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    for n in range(TURNS):
        paragraphs = "\n\n".join(f"Line {line} of answer **{n}**." for line in range(n % 7 + 1))
        code = f"\n\n```python\nprint({n})\n```" if n % 5 == 0 else ""
        turns.append(
            {
                "id": f"t{n}",
                "parentId": f"t{n - 1}" if n else None,
                "askId": f"t{n}",
                "createdAt": n,
                "text": f"Question {n}",
                "pictureIds": [],
                "answer": {"status": "done", "responseId": None, "text": paragraphs + code},
            }
        )
    conversation = {"title": "Long", "leafId": f"t{TURNS - 1}"}
    head = {"format": "mmserve-chat", "version": 1}
    return {**head, "conversation": conversation, "turns": turns, "pictures": []}


@pytest.fixture
def roomy(launch: Callable[..., Running]) -> Running:
    return launch(FakeEngine(FakeInfo(max_model_len=1_000_000)))


@pytest.fixture
def opened(roomy: Running, visit: Visit, tmp_path: Path) -> Tab:
    file = tmp_path / "long.json"
    file.write_text(json.dumps(long_chat()))
    tab = visit(roomy.url)
    tab.page.set_input_files("input[accept*=json]", file)
    expect(tab.page.locator(".question").last).to_have_text(f"Question {TURNS - 1}")
    tab.settle()
    return tab


def test_only_what_is_near_is_drawn_wherever_one_scrolls(opened: Tab) -> None:
    expect(opened.page.locator(".question").last).to_be_in_viewport()
    most = opened.page.evaluate(SCROLL, 400)
    print(most)
    assert 0 < most["turns"] <= FEW
    opened.settle()
    expect(opened.page.locator(".question").first).to_have_text("Question 0")
    expect(opened.page.locator(".question").first).to_be_in_viewport()
    opened.page.get_by_role("button", name="Jump to the newest message").click()
    expect(opened.page.locator(".question").last).to_have_text(f"Question {TURNS - 1}")
    expect(opened.page.locator(".question").last).to_be_in_viewport()


def test_what_is_read_does_not_move_while_heights_become_known(opened: Tab) -> None:
    page = opened.page
    page.evaluate("document.querySelector('.view').scrollTop = 40000")
    opened.settle()
    opened.settle()
    place = "q => [...document.querySelectorAll('.question')].find((e) => e.textContent === q)"
    place = f"q => ({place})(q).getBoundingClientRect().top"
    middle = page.evaluate(
        "[...document.querySelectorAll('.question')]"
        ".find((e) => e.getBoundingClientRect().top > 200).textContent"
    )
    before = page.evaluate(place, middle)
    page.evaluate("document.querySelector('.view').scrollTop -= 100")
    opened.settle()
    opened.settle()
    assert page.evaluate(place, middle) == pytest.approx(before + 100, abs=2)


def test_a_new_question_leads_to_the_end(opened: Tab) -> None:
    opened.page.evaluate("document.querySelector('.view').scrollTop = 0")
    opened.settle()
    assert opened.answered("And now?") == "you said: And now?"
    expect(opened.page.locator(".question").last).to_be_in_viewport()

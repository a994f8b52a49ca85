"""Pictures: three ways in, their order, sent once, read ahead, looked at closely, dragged about."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Locator, Route, expect

from mmserve.prompt import ImagePart
from tests.server.conftest import Running
from tests.server.fake_engine import FakeEngine, FakeInfo
from tests.web.conftest import Tab, picture
from tests.web.test_conversation import shape_of
from tests.web.test_look import PHONE, violations

pytestmark = pytest.mark.browser

Visit = Callable[..., Tab]

DRAG = """([from, to]) => {
  const data = new DataTransfer();
  const send = (node, type) => node.dispatchEvent(
    new DragEvent(type, { bubbles: true, cancelable: true, dataTransfer: data }));
  send(from, 'dragstart');
  send(to, 'dragover');
  send(to, 'drop');
}"""


def drag(tab: Tab, source: Locator, target: Locator) -> None:
    tab.page.evaluate(DRAG, [source.element_handle(), target.element_handle()])


def names(tab: Tab) -> list[str | None]:
    return [each.get_attribute("title") for each in tab.page.locator(".tray .view").all()]


def last_images(server: Running) -> list[bytes]:
    """The bytes of the newest question's pictures."""
    parts = server.engine.prompts[-1][-1].parts
    return [part.data for part in parts if isinstance(part, ImagePart)]


def uploads(tab: Tab) -> list[str]:
    sent: list[str] = []
    tab.page.on(
        "request",
        lambda request: sent.append(request.url) if request.url.endswith("/v1/files") else None,
    )
    return sent


def test_three_pictures_come_by_drop_paste_and_button(server: Running, visit: Visit) -> None:
    tab = visit()
    tab.drop(("drop.png", picture("red")))
    tab.paste("paste.png", picture("green"))
    button = {"name": "button.png", "mimeType": "image/png", "buffer": picture("blue")}
    tab.page.set_input_files("input[type=file][multiple]", button)  # type: ignore[arg-type]
    expect(tab.page.locator(".tray [data-state=ready]")).to_have_count(3)
    assert names(tab) == ["drop.png", "paste.png", "button.png"]
    tab.answered("Which colors?")
    assert last_images(server) == [picture("red"), picture("green"), picture("blue")]


def test_pictures_are_put_in_order_by_dragging_and_by_keys(server: Running, visit: Visit) -> None:
    tab = visit()
    tab.drop(("a.png", picture("red")), ("b.png", picture("green")), ("c.png", picture("blue")))
    items = tab.page.locator(".tray li")
    drag(tab, items.nth(2), items.nth(0))
    expect(items.first.locator(".view")).to_have_attribute("title", "c.png")
    assert names(tab) == ["c.png", "a.png", "b.png"]
    tab.page.get_by_role("button", name="View a.png").focus()
    tab.page.keyboard.press("Alt+ArrowRight")
    expect(tab.page.get_by_role("button", name="View a.png")).to_be_focused()
    expect(tab.page.get_by_text("a.png: 3 of 3")).to_be_attached()
    assert names(tab) == ["c.png", "b.png", "a.png"]
    tab.answered("Which?")
    assert last_images(server) == [picture("blue"), picture("green"), picture("red")]


def test_the_same_bytes_are_sent_once(server: Running, visit: Visit) -> None:
    tab = visit()
    sent = uploads(tab)
    tab.drop(("a.png", picture("red")))
    tab.answered("What color?")
    assert len(sent) == 1
    tab.wait_until_stored("pictures", "all => all.length === 1")
    tab.drop(("again.png", picture("red")))
    tab.answered("And this?")
    assert last_images(server) == [picture("red")]
    tab.new_chat()
    tab.drop(("elsewhere.png", picture("red")))
    tab.answered("And here?")
    assert last_images(server) == [picture("red")]
    assert len(sent) == 1


def test_a_picture_that_was_read_ahead_says_so(server: Running, visit: Visit) -> None:
    tab = visit()
    tab.drop(("a.png", picture("red")))
    expect(tab.page.locator(".tray [data-warm=true]")).to_have_count(1)
    assert shape_of(server.engine.prompts[-1]) == [("user", 1, "")]


def test_a_picture_of_a_turn_is_dragged_into_the_next(server: Running, visit: Visit) -> None:
    tab = visit()
    sent = uploads(tab)
    tab.drop(("a.png", picture("red")))
    tab.answered("What color?")
    drag(tab, tab.page.locator(".pictures button"), tab.page.locator("textarea"))
    expect(tab.page.locator(".tray li")).to_have_count(1)
    tab.answered("And again?")
    assert shape_of(server.engine.prompts[-1])[-1] == ("user", 1, "And again?")
    assert len(sent) == 1


def test_a_picture_is_dragged_into_a_turn_being_edited(server: Running, visit: Visit) -> None:
    tab = visit()
    tab.drop(("a.png", picture("red")))
    tab.answered("One")
    tab.drop(("b.png", picture("blue")))
    tab.answered("Two")
    tab.page.get_by_role("button", name="Edit").first.click()
    drag(tab, tab.page.locator(".pictures button").last, tab.page.locator("form.editor"))
    expect(tab.page.locator("form.editor .tray li")).to_have_count(2)
    expect(tab.page.locator("form.composer .tray li")).to_have_count(0)
    tab.page.get_by_label("Edit the message").press("Enter")
    tab.page.wait_for_function("() => document.querySelectorAll('article').length === 1")
    tab.wait("done")
    assert last_images(server) == [picture("red"), picture("blue")]


def test_the_viewer_zooms_and_goes_from_picture_to_picture(visit: Visit) -> None:
    tab = visit()
    tab.drop(("a.png", picture("red", (600, 400))), ("b.png", picture("blue", (600, 400))))
    tab.answered("What?")
    tab.page.get_by_role("button", name="View Picture 1").click()
    viewer = tab.page.get_by_role("dialog", name="a.png")
    expect(viewer).to_be_visible()
    image = viewer.locator("img")
    width = "image => image.getBoundingClientRect().width"
    before = image.evaluate(width)
    viewer.get_by_role("button", name="Zoom in").click()
    assert image.evaluate(width) == pytest.approx(1.5 * before)
    tab.page.keyboard.press("0")
    image.hover()
    tab.page.mouse.wheel(0, -200)
    tab.page.wait_for_function(
        "w => document.querySelector('dialog img').getBoundingClientRect().width > 1.2 * w",
        arg=before,
    )
    assert violations(tab) == []
    tab.page.keyboard.press("ArrowRight")
    expect(tab.page.get_by_role("dialog", name="b.png")).to_be_visible()
    assert tab.page.locator("dialog img").evaluate(width) == pytest.approx(before)
    tab.page.keyboard.press("Escape")
    expect(tab.page.locator("dialog")).to_have_count(0)


def test_a_phone_offers_its_camera(server: Running, visit: Visit) -> None:
    tab = visit(**PHONE, is_mobile=True)
    camera = tab.page.locator("input[capture=environment]")
    expect(tab.page.get_by_role("button", name="Take a picture")).to_be_visible()
    shot = {"name": "image.jpg", "mimeType": "image/png", "buffer": picture("red")}
    camera.set_input_files(shot)  # type: ignore[arg-type]
    expect(tab.page.locator(".tray [data-state=ready]")).to_have_count(1)


def test_a_file_name_is_text_and_nothing_else(visit: Visit) -> None:
    tab = visit()
    evil = "<img src=x onerror=window.hacked=1>.png"
    tab.drop((evil, picture("red")), ('"><script>window.hacked=1</script>.png', b"no picture"))
    expect(tab.page.get_by_role("alert")).to_contain_text("<script>window.hacked=1</script>.png")
    tab.page.get_by_role("button", name=f"View {evil}").click()
    expect(tab.page.locator("dialog")).to_contain_text(evil)
    tab.settle()
    assert tab.page.evaluate("window.hacked") is None


@pytest.fixture(scope="module")
def photograph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JPEG of 40 MB: noise, which does not compress."""
    path = tmp_path_factory.mktemp("photo") / "photo.jpg"
    size = (4800, 3600)
    noise = Image.frombytes("RGB", size, random.Random(0).randbytes(3 * size[0] * size[1]))
    buffer = io.BytesIO()
    noise.save(buffer, "JPEG", quality=95, subsampling=0)
    path.write_bytes(buffer.getvalue())
    return path


def test_a_photograph_of_40_mb_is_made_smaller_while_the_page_goes_on(
    server: Running, visit: Visit, photograph: Path
) -> None:
    assert photograph.stat().st_size > 40_000_000
    tab = visit()
    tab.page.evaluate(
        """() => {
          window.longest = 0;
          new PerformanceObserver((list) => {
            for (const { duration } of list.getEntries())
              window.longest = Math.max(window.longest, duration);
          }).observe({ type: 'longtask' });
        }"""
    )
    tab.page.set_input_files("input[type=file][multiple]", photograph)
    tab.page.wait_for_selector(".tray [data-state=uploading]")
    tab.page.fill("textarea", "typed meanwhile")
    # The page takes input while the worker is still at it.
    expect(tab.page.locator(".tray [data-state=uploading]")).to_have_count(1)
    tab.page.wait_for_selector(".tray [data-state=ready]")
    print(f"longest task of the page: {tab.page.evaluate('window.longest')} ms")
    tab.page.press("textarea", "Enter")
    tab.wait("done")
    (sent,) = last_images(server)
    assert len(sent) <= server.engine.info.image_limits.max_bytes
    preview = tab.page.locator(".pictures img").evaluate("image => image.naturalWidth")
    assert preview <= 720


def test_a_picture_that_is_chosen_before_the_server_has_told_its_limits_keeps_to_them(
    server: Running, visit: Visit, photograph: Path
) -> None:
    tab, held = visit(), list[Route]()

    def hold(route: Route) -> None:
        held.append(route)

    tab.page.route("**/v1/models", hold)
    tab.page.reload()
    tab.page.set_input_files("input[type=file][multiple]", photograph)
    tab.page.wait_for_selector(".tray [data-state=uploading]")
    while not held:
        tab.page.wait_for_timeout(10)
    for each in held:
        each.continue_()
    tab.answered("What is it?")
    (sent,) = last_images(server)
    assert len(sent) <= server.engine.info.image_limits.max_bytes


def test_an_original_is_kept_where_that_is_set(server: Running, visit: Visit) -> None:
    """Larger than the page sends; over a reload, and not before it is asked for."""
    tab = visit()
    widths = []
    for kept in (False, True):
        tab.page.get_by_role("button", name="Settings").click()
        box = tab.page.get_by_label("Keep originals of pictures that are made smaller")
        box.set_checked(kept)
        tab.page.keyboard.press("Escape")
        name = f"{kept}.png"
        tab.drop((name, picture("red" if kept else "blue", (17_000, 40))))
        tab.answered(f"What? {kept}")
        tab.page.reload()
        tab.page.locator(".pictures img").last.click()
        shown = tab.page.locator("dialog img")
        expect(shown).to_be_visible()
        tab.page.wait_for_function("document.querySelector('dialog img').naturalWidth > 0")
        widths.append(shown.evaluate("image => image.naturalWidth"))
        tab.page.keyboard.press("Escape")
    assert widths[1] == 17_000 > widths[0]


def test_a_message_says_how_finely_its_pictures_are_looked_at(
    launch: Callable[..., Running], visit: Visit
) -> None:
    """Where the model has a choice, and while there are pictures; another answer asks as before."""
    nested = {"auto": 64, "low": 16, "high": 64, "original": 64}
    server = launch(FakeEngine(FakeInfo(image_details=nested)))
    tab = visit(server.url)
    choice = tab.page.get_by_label("Detail of the pictures")
    expect(choice).to_have_count(0)
    tab.drop(("red.png", picture("red")))
    tab.page.wait_for_selector(".tray [data-state=ready]")
    expect(choice.locator("option")).to_have_text(["Detail: auto", "Detail: low"])
    choice.select_option("low")
    tab.answered("What?")
    tab.page.reload()
    tab.page.get_by_role("button", name="Another answer").click()
    tab.page.get_by_text("2/2").wait_for()
    tab.wait("done")
    asked = [part.detail for part in server.engine.prompts[-1][-1].parts if isinstance(part, ImagePart)]
    assert asked == ["low"]

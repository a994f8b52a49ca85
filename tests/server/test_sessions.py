"""Session policies: what is cut when, what stays, what is inherited, and that it is said."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mmserve.config import ImageLimits, ServerConfig
from mmserve.prompt import ImagePart, Message, TextPart, TokensPart
from tests.server.conftest import Running, data_url, png, start
from tests.server.fake_engine import FakeEngine, FakeInfo, encode

WINDOW = 400
Start = Callable[..., Running]


def engine() -> FakeEngine:
    return FakeEngine(FakeInfo(image_limits=ImageLimits(max_images=100)))


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Start]:
    """Start a server over one folder; one that ran before is stopped."""
    stops: list[Callable[[], None]] = []

    def again(fake: FakeEngine | None = None, **settings: Any) -> Running:
        while stops:
            stops.pop()()
        settings = {"data_dir": tmp_path / "data", **settings}
        running, stop = start(ServerConfig(port=0, **settings), fake or engine())
        stops.append(stop)
        return running

    yield again
    while stops:
        stops.pop()()


def post(running: Running, text: str, *images: str, **body: Any) -> Any:
    content: list[dict[str, Any]] = [{"type": "input_text", "text": text}]
    content += [{"type": "input_image", "image_url": data_url(png(tag))} for tag in images]
    return running.http().post(
        "/v1/responses", json={"input": [{"role": "user", "content": content}], **body}
    )


def ask(running: Running, text: str, *images: str, **body: Any) -> dict[str, Any]:
    answer = post(running, text, *images, **body)
    assert answer.status_code == 200, answer.text
    assert running.idle()
    response: dict[str, Any] = answer.json()
    return response


def talk(running: Running, count: int, first: dict[str, Any], **body: Any) -> list[dict[str, Any]]:
    """`count` turns of some 140 tokens and a picture; `first`: fields of the first."""
    turns: list[dict[str, Any]] = []
    for i in range(count):
        parent = {"previous_response_id": turns[-1]["id"]} if turns else first
        turns.append(ask(running, f"turn {i} ".ljust(50, "."), f"picture {i}", **parent, **body))
    return turns


def texts(message: Message) -> str:
    shown = []
    for part in message.parts:
        if isinstance(part, TextPart):
            shown.append(part.text)
        elif isinstance(part, TokensPart):
            shown.append(bytes(part.token_ids).decode())
        else:
            shown.append(f"[{part.number}]")
    return " ".join(shown)


def prompts(running: Running, kind: str) -> list[list[Message]]:
    """Of all that was submitted under ids of one kind."""
    pairs = zip(running.engine.ids, running.engine.prompts, strict=True)
    return [prompt for id, prompt in pairs if id.startswith(kind)]


def size(prompt: list[Message]) -> int:
    """Text tokens, as the fake engine counts them."""
    return sum(
        len(encode(f"<{message.role}>"))
        + sum(len(encode(p.text)) for p in message.parts if isinstance(p, TextPart))
        + sum(len(p.token_ids) for p in message.parts if isinstance(p, TokensPart))
        for message in prompt
    )


def numbers(prompt: list[Message]) -> list[int | None]:
    return [p.number for m in prompt for p in m.parts if isinstance(p, ImagePart)]


def test_a_conversation_without_a_policy_is_kept_whole_and_says_nothing(begin: Start) -> None:
    running = begin()
    turns = talk(running, 5, {})
    assert all(turn["session"] is None for turn in turns)
    assert len(prompts(running, "resp")[-1]) == 9 and not prompts(running, "prefill")
    assert numbers(prompts(running, "resp")[-1]) == [1, 2, 3, 4, 5]


def test_text_never_grows_far_beyond_the_window_and_pictures_stay(begin: Start) -> None:
    running = begin()
    turns = talk(running, 12, {"session_policy": {"window": WINDOW}}, instructions="be brief")
    made = prompts(running, "resp")
    assert max(map(size, made)) <= WINDOW
    assert numbers(made[-1]) == list(range(1, 13)), "each keeps its number"
    assert all(prompt[0] == Message("system", (TextPart("be brief"),)) for prompt in made)
    assert len(made[-1]) < 12 and made[-1][1].role == "user"
    session = turns[-1]["session"]
    assert session["policy"]["window"] == WINDOW and session["kept_images"] == 12
    assert session["dropped_items"] + len(made[-1]) - 1 == 2 * 11 + 1
    assert session["dropped_images"] == 0 and session["dropped_tokens"] > WINDOW
    assert session["approximate"] is False


def test_a_conversation_keeps_its_name_over_cuts(begin: Start) -> None:
    running = begin()
    turns = talk(running, 12, {"session_policy": {"window": WINDOW}})
    assert turns[-1]["session"]["dropped_items"] > 0
    other = ask(running, "another one")
    assert running.idle()
    named = running.services.responses.conversation
    ahead = [id for id in running.engine.ids if id.startswith("prefill")]
    assert ahead and {named(id) for id in ahead} == {turns[0]["id"]}
    assert {named(turn["id"]) for turn in turns} == {turns[0]["id"]}
    assert named(other["id"]) == other["id"] and named("resp_none") is None


def test_cuts_are_rare_and_go_down_to_half(begin: Start) -> None:
    running = begin()
    turns = talk(running, 12, {"session_policy": {"window": WINDOW}})
    dropped = [turn["session"]["dropped_items"] for turn in turns]
    steps = [b - a for a, b in zip(dropped, dropped[1:], strict=False)]
    assert [step for step in steps if step] == [4] * 5 and dropped[:3] == [0, 0, 0], dropped
    sizes = [size(prompt) for prompt in prompts(running, "prefill")]
    assert sizes and max(sizes) <= WINDOW // 2


def test_the_new_layout_is_computed_before_the_next_turn_asks_for_it(begin: Start) -> None:
    running = begin()
    turns = talk(running, 4, {"session_policy": {"window": WINDOW}})
    made = prompts(running, "resp")
    (ahead,) = prompts(running, "prefill")
    assert turns[-1]["session"]["dropped_items"] > 0 == turns[-2]["session"]["dropped_items"]
    assert [texts(m) for m in made[-1][: len(ahead)]] == [texts(m) for m in ahead]
    assert running.engine.ids.index(turns[-1]["id"]) == len(running.engine.ids) - 1


@pytest.mark.parametrize(
    ("images", "kept"), [("all", [1, 2, 3, 4]), (2, [3, 4]), (3, [2, 3, 4]), ("pinned", [4])]
)
def test_which_pictures_of_dropped_turns_stay_is_the_policys(
    begin: Start, images: Any, kept: list[int]
) -> None:
    running = begin()
    policy = {"window": 120, "images": images}  # no turn beside the newest fits
    turns = talk(running, 4, {"session_policy": policy})
    assert numbers(prompts(running, "resp")[-1]) == kept
    session = turns[-1]["session"]
    assert session["kept_images"] == len(kept) and session["dropped_images"] == 4 - len(kept)


def test_kept_pictures_stand_at_the_head_of_the_first_turn(begin: Start) -> None:
    running = begin()
    talk(running, 3, {"session_policy": {"window": 120}})
    (message,) = prompts(running, "resp")[-1]
    assert texts(message).startswith("[1] [2] turn 2 ") and texts(message).endswith(" [3]")


def test_a_pinned_picture_stays_whatever_the_policy(begin: Start) -> None:
    running = begin()
    first = talk(running, 1, {"session_policy": {"window": 120, "images": 0}})[0]
    turn = running.services.responses.get(
        first["id"], next(iter(running.services.responses._turns.values())).owner
    )
    digest = turn.items[0].images[0].digest
    turn.session = turn.session.pin(digest)
    if turn.kept is not None:
        turn.kept = replace(turn.kept, state=turn.session)
    for _ in range(3):
        first = ask(running, "on " * 30, "another", previous_response_id=first["id"])
    assert numbers(prompts(running, "resp")[-1]) == [1, 4]


def test_a_policy_is_inherited_replaced_and_turned_off(begin: Start) -> None:
    running = begin()
    first = ask(running, "a", session_policy={"window": WINDOW, "images": 3})
    second = ask(running, "b", previous_response_id=first["id"])
    assert second["session"]["policy"] == first["session"]["policy"]
    assert second["session"]["policy"] == {
        "window": WINDOW,
        "sinks": 4,
        "images": 3,
        "summary": False,
    }
    other = ask(running, "c", previous_response_id=second["id"], session_policy={"window": 500})
    assert other["session"]["policy"]["window"] == 500
    assert other["session"]["policy"]["images"] == "all"
    off = ask(running, "d", previous_response_id=other["id"], session_policy=None)
    assert off["session"] is None
    assert ask(running, "e", previous_response_id=off["id"])["session"] is None


@pytest.mark.parametrize(
    ("policy", "param", "said"),
    [
        (7, "session_policy", "an object"),
        ({"window": 31}, "session_policy.window", "from 32 to 3072 text tokens"),
        ({"window": 3073}, "session_policy.window", "context has 4096"),
        ({"window": "all"}, "session_policy.window", "an integer"),
        ({"window": 400, "sinks": 101}, "session_policy.sinks", "from 0 to 100"),
        ({"images": -1}, "session_policy.images", "from 0 to"),
        ({"images": "some"}, "session_policy.images", "'all', 'pinned' or a number"),
        ({"images": True}, "session_policy.images", "'all', 'pinned' or a number"),
        ({"summary": 1}, "session_policy.summary", "a boolean"),
        ({"size": 1}, "session_policy.size", "window, sinks, images, summary"),
    ],
)
def test_a_bad_policy_is_refused_by_field_and_limit(
    server: Running, policy: Any, param: str, said: str
) -> None:
    answer = server.http().post("/v1/responses", json={"input": "x", "session_policy": policy})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and said in error["message"]


def test_a_policy_works_over_the_socket(begin: Start) -> None:
    running = begin()
    parent: dict[str, Any] = {"session_policy": {"window": 120}}
    with running.openai().responses.connect() as socket:
        for _ in range(3):
            socket.send({"type": "response.create", "input": "hello " * 8, **parent})  # type: ignore[arg-type]
            done = next(e for e in socket if e.type == "response.completed").response
            parent = {"previous_response_id": done.id}
            assert running.idle()
    assert done.model_extra and done.model_extra["session"]["dropped_items"] == 4
    assert len(prompts(running, "resp")[-1]) == 1


def test_a_context_that_is_full_says_that_there_is_a_policy(begin: Start) -> None:
    running = begin()
    first = ask(running, "x" * 1500)
    answer = post(running, "y" * 1500, previous_response_id=first["id"])
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded" and "session_policy" in error["message"]
    alone = post(running, "y" * 5000).json()["error"]
    assert alone["code"] == "context_length_exceeded" and "session_policy" not in alone["message"]


def test_a_conversation_that_has_outgrown_a_new_policy_is_cut_at_once(begin: Start) -> None:
    running = begin()
    last = talk(running, 10, {})[-1]
    cut = ask(running, "and now?", previous_response_id=last["id"], session_policy={"window": 400})
    prompt = prompts(running, "resp")[-1]
    assert size(prompt) <= 200 and texts(prompt[-1]) == "and now?"
    assert cut["session"]["dropped_items"] == 21 - len(prompt)
    assert numbers(prompt) == list(range(1, 11))


def test_a_turn_that_is_larger_than_the_window_goes_alone(begin: Start) -> None:
    running = begin()
    last = talk(running, 2, {"session_policy": {"window": 400}})[-1]
    big = ask(running, "z" * 700, previous_response_id=last["id"])
    assert [m.role for m in prompts(running, "resp")[-1]] == ["user"]
    assert big["session"]["dropped_items"] == 4
    ask(running, "small", previous_response_id=big["id"])
    assert texts(prompts(running, "resp")[-1][-1]).endswith("small")
    assert size(prompts(running, "resp")[-1]) < 400


def test_pictures_that_outgrow_the_context_go_oldest_first(begin: Start) -> None:
    fake = FakeEngine(FakeInfo(max_model_len=600, image_limits=ImageLimits(max_images=100)))
    running = begin(fake)
    last = talk(running, 20, {"session_policy": {"window": 400}})[-1]  # room for 12 pictures
    shown = numbers(prompts(running, "resp")[-1])
    assert 6 <= len(shown) <= 12 and shown == list(range(21 - len(shown), 21))
    assert last["session"]["dropped_images"] == 20 - len(shown)


def test_a_call_and_its_output_stay_with_their_question(begin: Start) -> None:
    running = begin()
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    last = talk(running, 2, {"session_policy": {"window": 1000}})[-1]
    running.engine.script = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    called = ask(running, "go and look", previous_response_id=last["id"], tools=[tool])
    running.engine.script = None
    (call,) = [item for item in called["output"] if item["type"] == "function_call"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "seen " * 180}
    body = {"input": [output], "previous_response_id": called["id"], "tools": [tool]}
    assert running.http().post("/v1/responses", json=body).status_code == 200
    roles = [message.role for message in prompts(running, "resp")[-1]]
    assert roles == ["user", "assistant", "tool"], "the two turns before went"


def test_it_goes_on_after_a_restart_as_if_there_had_been_none(begin: Start) -> None:
    running = begin()
    turns = talk(running, 4, {"session_policy": {"window": WINDOW, "images": 2}})
    for turn in turns[1:3]:  # before and after a cut
        again = ask(running, "go on", "new", previous_response_id=turn["id"])
        before = [(m.role, texts(m)) for m in prompts(running, "resp")[-1]]
        running = begin()
        restarted = ask(running, "go on", "new", previous_response_id=turn["id"])
        assert [(m.role, texts(m)) for m in prompts(running, "resp")[-1]] == before
        assert restarted["session"] == again["session"]


def test_a_cut_outlives_what_was_dropped(begin: Start) -> None:
    running = begin()
    turns = talk(running, 4, {"session_policy": {"window": WINDOW}})
    for turn in turns[:3]:
        running.http().delete(f"/v1/responses/{turn['id']}")
    running = begin()
    ask(running, "go on", previous_response_id=turns[3]["id"])
    assert numbers(prompts(running, "resp")[-1]) == [1, 2, 3, 4]


def test_branches_of_a_tree_keep_their_own_state(begin: Start) -> None:
    running = begin()
    root = talk(running, 2, {})[-1]
    tight = ask(running, "a", previous_response_id=root["id"], session_policy={"window": 120})
    free = ask(running, "b", previous_response_id=root["id"])
    assert tight["session"]["dropped_items"] == 4 and free["session"] is None
    for turn, count in ((tight, 3), (free, 7)):
        ask(running, "c", previous_response_id=turn["id"])
        assert len(prompts(running, "resp")[-1]) == count


def test_two_children_of_one_parent_at_once(begin: Start) -> None:
    running = begin()
    parent = talk(running, 3, {"session_policy": {"window": WINDOW}})[-1]
    made = len(prompts(running, "resp"))
    answers: list[dict[str, Any]] = []
    asks = [
        threading.Thread(
            target=lambda i=i: answers.append(
                post(running, f"child {i}", f"c{i}", previous_response_id=parent["id"]).json()
            )
        )
        for i in range(4)
    ]
    for each in asks:
        each.start()
    for each in asks:
        each.join()
    assert running.idle()
    assert [a["status"] for a in answers] == ["completed"] * 4
    assert all(a["session"] == answers[0]["session"] for a in answers)
    shown = [numbers(prompt) for prompt in prompts(running, "resp")[made:]]
    assert shown == [[1, 2, 3, 4]] * 4


def test_a_long_conversation_costs_a_turn_no_more_than_a_short_one(begin: Start) -> None:
    running = begin(max_stored_responses=20)
    last: dict[str, Any] = {}
    parent: dict[str, Any] = {"session_policy": {"window": 300, "images": 2}}
    entries, sizes = [], []
    for i in range(60):
        last = ask(running, f"turn {i}".ljust(30, "."), *["p"] * (i % 3 == 0), **parent)
        parent = {"previous_response_id": last["id"]}
        turn = running.services.responses._turns[last["id"]]
        entries.append(len(turn.history().entries))
        depth, ancestor = 0, turn
        while ancestor.parent is not None:
            depth, ancestor = depth + 1, ancestor.parent
        sizes.append(depth)
    assert max(entries) <= 14 and max(sizes) <= 6
    assert last["session"]["dropped_items"] > 100


def test_truncation_says_what_it_dropped(begin: Start) -> None:
    running = begin(FakeEngine(FakeInfo(max_model_len=500)))
    last = talk(running, 5, {}, truncation="auto")[-1]
    assert last["session"]["dropped_items"] == 9 - len(prompts(running, "resp")[-1])
    assert last["session"]["policy"] is None


# Summaries


def summarised(running: Running) -> list[dict[str, Any]]:
    return talk(running, 4, {"session_policy": {"window": WINDOW, "summary": True}})


def test_a_summary_stands_for_what_was_dropped(begin: Start) -> None:
    running = begin()
    last = summarised(running)[-1]
    asked = prompts(running, "summary")[0]
    first = prompts(running, "resp")[-2]
    assert asked[:4] == first[:4], "it reads what was dropped, as it was laid out"
    assert asked[-1].role == "user" and "Summarize" in texts(asked[-1])
    session = last["session"]
    assert session["summary"] == "they met"
    assert session["summary_missing"] is None
    head = texts(prompts(running, "resp")[-1][0])
    assert head.startswith("Summary of the earlier part") and session["summary"] in head
    assert texts(prompts(running, "prefill")[0][0]) == head


def test_a_later_summary_reads_the_earlier_one(begin: Start) -> None:
    running = begin()
    policy = {"window": 700, "summary": True}
    talk(running, 9, {"session_policy": policy})
    asked = prompts(running, "summary")
    assert len(asked) > 1
    assert "Summary of the earlier part" in texts(asked[1][0])
    limits = zip(running.engine.ids, running.engine.params, strict=True)
    assert {params.max_tokens for id, params in limits if id.startswith("summary")} == {700 // 8}


def test_a_summary_is_there_after_a_restart(begin: Start) -> None:
    running = begin()
    last = summarised(running)[-2]
    running = begin()
    again = ask(running, "go on", previous_response_id=last["id"])
    assert again["session"]["summary"] == "they met"


def test_a_turn_does_not_wait_for_a_summary(begin: Start) -> None:
    running = begin()
    parent = talk(running, 2, {"session_policy": {"window": WINDOW, "summary": True}})[-1]
    running.engine.hold_at, running.engine.held = 0, "summary"
    cut = post(running, "x" * 80, previous_response_id=parent["id"]).json()
    early = post(running, "go on", previous_response_id=cut["id"]).json()
    assert early["session"]["dropped_items"] > 0 and early["session"]["summary"] is None
    assert "not ready" in early["session"]["summary_missing"]
    running.engine.hold_at = None
    assert running.idle()
    assert not prompts(running, "prefill"), "the branch that is there has another layout"
    late = ask(running, "go on", previous_response_id=cut["id"])
    assert late["session"]["summary"] == "they met" and late["session"]["summary_missing"] is None


def test_a_summary_that_came_late_is_taken_in_at_the_next_cut(begin: Start) -> None:
    running = begin()
    parent = talk(running, 2, {"session_policy": {"window": WINDOW, "summary": True}})[-1]
    running.engine.hold_at, running.engine.held = 0, "summary"
    cut = post(running, "x" * 80, previous_response_id=parent["id"]).json()
    early = post(running, "go on", previous_response_id=cut["id"]).json()
    running.engine.hold_at = None
    assert running.idle()
    running.engine.summary = "they parted"
    same = ask(running, "still", previous_response_id=early["id"])
    assert same["session"]["summary"] is None, "the layout stays as it is"
    again = ask(running, "y" * 150, previous_response_id=same["id"])
    assert again["session"]["summary"] in ("they met", "they parted")
    assert "they met" in texts(prompts(running, "summary")[1][0]), "it is summarised on"
    last = ask(running, "well", previous_response_id=again["id"])
    assert last["session"]["summary"] == "they parted"


def test_a_cut_at_the_start_of_a_turn_is_summarised_at_its_end(begin: Start) -> None:
    running = begin()
    policy = {"window": 400, "summary": True}
    last = talk(running, 5, {})[-1]
    cut = ask(running, "and now?", previous_response_id=last["id"], session_policy=policy)
    assert cut["session"]["summary"] is None and "not ready" in cut["session"]["summary_missing"]
    after = ask(running, "well", previous_response_id=cut["id"])
    assert after["session"]["summary"] == "they met"
    ahead = prompts(running, "prefill")[-1]
    assert [texts(m) for m in prompts(running, "resp")[-1][: len(ahead)]] == list(map(texts, ahead))


def test_a_summary_that_fails_is_reported(begin: Start) -> None:
    running = begin()
    parent = talk(running, 2, {"session_policy": {"window": WINDOW, "summary": True}})[-1]
    running.engine.broken = "summary"
    cut = ask(running, "x" * 80, previous_response_id=parent["id"])
    after = ask(running, "go on", previous_response_id=cut["id"])
    assert after["session"]["dropped_items"] > 0 and after["session"]["summary"] is None
    assert "tripped" in after["session"]["summary_missing"]


# What is forgotten, and inside a turn


def states(prompt: list[Message]) -> list[tuple[int | None, str]]:
    return [(p.number, p.state) for m in prompt for p in m.parts if isinstance(p, ImagePart)]


@pytest.mark.parametrize(("how", "state"), [("recompute", "gone"), ("mark", "marked")])
def test_a_forgotten_picture_is_not_shown_until_it_is_sent_again(
    begin: Start, how: Any, state: str
) -> None:
    running = begin()
    last = talk(running, 2, {})[-1]
    turn = running.services.responses._turns[last["id"]]
    assert turn.parent is not None
    digest = turn.parent.items[0].images[0].digest
    turn.session = turn.session.forget(digest, how)
    after = ask(running, "and?", previous_response_id=last["id"])
    assert states(prompts(running, "resp")[-1]) == [(1, state), (2, "shown")]
    assert after["session"]["kept_images"] == 1
    assert after["session"]["approximate"] == (how == "mark")
    ask(running, "again", "picture 0", previous_response_id=after["id"])
    assert states(prompts(running, "resp")[-1]) == [(1, "shown"), (2, "shown"), (3, "shown")]


def test_an_answer_is_told_how_to_go_on_when_it_outgrows_its_window(begin: Start) -> None:
    running = begin()
    first = ask(running, "x" * 50, "p", instructions="be brief", session_policy={"window": 400})
    streaming = running.engine.streaming[0]
    assert streaming is not None
    assert (streaming.window, streaming.keep, streaming.images) == (600, 300, None)
    assert len("<system>be brief") - 4 <= streaming.sinks < 40
    assert running.engine.params[0].max_tokens == running.engine.info.max_model_len
    policy = {"window": 400, "images": 1}
    ask(running, "y", "q", previous_response_id=first["id"], session_policy=policy)
    assert [s and s.images for s in running.engine.streaming] == [None, 1]
    ask(running, "y", previous_response_id=first["id"], session_policy=None)
    assert running.engine.streaming[2] is None and running.engine.params[2].max_tokens is None


def test_pinned_pictures_stay_inside_a_turn_under_the_engines_names(begin: Start) -> None:
    running = begin()
    last = talk(running, 3, {"session_policy": {"window": 1000, "images": 1}})[-1]
    turn = running.services.responses._turns[last["id"]]
    first = turn.parent.parent.items[0].images[0]  # type: ignore[union-attr]
    turn.session = turn.session.pin(first.digest)
    ask(running, "and?", previous_response_id=last["id"])
    digests = {bytes.fromhex(i.digest) for i in (first, *turn.items[0].images)}
    streaming = running.engine.streaming[-1]
    assert streaming is not None and streaming.images == frozenset(digests)


def test_turns_of_a_server_that_knew_no_sessions_go_on_and_are_cut(
    begin: Start, tmp_path: Path
) -> None:
    running = begin()
    last = talk(running, 6, {})[-1]
    begin()  # the first has written all that it will
    database = sqlite3.connect(tmp_path / "data" / "mmserve.db")
    for id, question in database.execute("SELECT id, question FROM turns").fetchall():
        body = json.loads(question)
        del body["images"]
        for item in body["items"]:
            del item["tokens"]
            for part in item["parts"]:
                for name in ("number", "item_id"):
                    part.pop(name, None)
        database.execute("UPDATE turns SET question = ? WHERE id = ?", (json.dumps(body), id))
    database.execute("ALTER TABLE turns DROP COLUMN session")
    database.execute("UPDATE alembic_version SET version_num = '0002'")
    database.commit()
    database.close()
    running = begin()
    on = ask(running, "more", "new", previous_response_id=last["id"])
    assert numbers(prompts(running, "resp")[-1]) == [1, 2, 3, 4, 5, 6, 7]
    policy = {"window": 400}
    cut = ask(running, "well?", previous_response_id=on["id"], session_policy=policy)
    assert cut["session"]["dropped_items"] > 0
    assert numbers(prompts(running, "resp")[-1]) == [1, 2, 3, 4, 5, 6, 7]
    assert size(prompts(running, "resp")[-1]) <= 400


def test_what_is_not_stored_is_cut_and_summarised_on_its_socket(
    begin: Start, tmp_path: Path
) -> None:
    running = begin()
    running.engine.summary = "a whispered summary"
    parent: dict[str, Any] = {"session_policy": {"window": 120, "summary": True}}
    with running.openai().responses.connect() as socket:
        for _ in range(4):
            create = {"type": "response.create", "store": False, "input": "whispered words " * 4}
            socket.send({**create, **parent})  # type: ignore[arg-type]
            done = next(e for e in socket if e.type == "response.completed").response
            parent = {"previous_response_id": done.id}
            assert running.idle()
    assert done.model_extra is not None
    assert done.model_extra["session"]["summary"] == "a whispered summary"
    everything = b"".join(f.read_bytes() for f in (tmp_path / "data").rglob("*") if f.is_file())
    assert b"whispered" not in everything


def test_a_turn_that_fills_the_window_is_not_computed_ahead(begin: Start) -> None:
    running = begin()
    last = talk(running, 2, {"session_policy": {"window": 400}})[-1]
    ask(running, "z" * 700, previous_response_id=last["id"])
    assert not prompts(running, "prefill")


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_said_in_whatever_tree(begin: Start, seed: int) -> None:
    """Every item is in the prompt or counted as dropped, pictures keep their numbers, and no prompt
    of several turns passes its window."""
    random = Random(seed)
    running = begin()
    tree: list[tuple[str, int, int]] = []  # id, items and pictures up to its answer
    window: dict[str, int | None] = {}
    for step in range(45):
        if step % 20 == 19:
            running = begin()
        body: dict[str, Any] = {}
        parent, items, shown = random.choice(tree[-3:]) if step else ("", 0, 0)
        limit = window.get(parent)
        if parent:
            body["previous_response_id"] = parent
        if random.random() < 0.3:
            limit = random.choice([None, 150, 300, 600])
            images = random.choice(["all", "pinned", 0, 2])
            policy = {"window": limit, "images": images, "summary": random.random() < 0.5}
            body["session_policy"] = policy if limit else None
        pictures = [f"picture {random.randrange(9)}" for _ in range(random.randrange(3))]
        turn = ask(running, "word " * random.randrange(1, 40), *pictures, **body)
        items, shown = items + 2, shown + len(pictures)
        tree.append((turn["id"], items, shown))
        window[turn["id"]] = limit
        prompt, session = prompts(running, "resp")[-1], turn["session"] or {}
        assert len(prompt) + session.get("dropped_items", 0) == items - 1
        called = [number or 0 for number in numbers(prompt)]
        assert called == sorted(set(called)) and all(0 < number <= shown for number in called)
        assert called[len(called) - len(pictures) :] == [
            *range(shown - len(pictures) + 1, shown + 1)
        ]
        assert len(called) + session.get("dropped_images", 0) == shown
        if limit and len(prompt) > 1:
            assert size(prompt) <= limit

"""The workloads say the same for the same seed, and repeat what they promise to repeat."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import pairwise

import pytest
from PIL import Image

from mmserve.bench.pictures import SIZE, draw
from mmserve.bench.workload import WORKLOADS, Phase, Session, Shape, build
from mmserve.prompt import ImagePart, Message, TextPart, TokensPart

SMALL = Shape(sessions=3, turns=4, images=5, prompt_tokens=6, output_tokens=2)
ANSWERS = [(1,), (2,), (3,)]


def images(messages: tuple[Message, ...]) -> list[bytes]:
    return [p.data for m in messages for p in m.parts if isinstance(p, ImagePart)]


def by_name(phases: tuple[Phase, ...]) -> dict[str, Phase]:
    return {phase.name: phase for phase in phases}


def opening(session: Session) -> list[bytes]:
    return images(session.messages(0, []))


@pytest.mark.parametrize("name", WORKLOADS)
def test_equal_seeds_give_equal_workloads_and_others_share_no_image_or_text(name: str) -> None:
    shape = replace(SMALL, images=0) if name == "text" else SMALL
    first, again, other = (build(name, shape, seed) for seed in (1, 1, 2))
    assert first == again
    turns = [{t for p in w for s in p.sessions for t in s.turns} for w in (first, other)]
    assert not {t.text for t in turns[0]} & {t.text for t in turns[1]}
    assert not {i for t in turns[0] for i in t.images} & {i for t in turns[1] for i in t.images}


def test_pictures_differ_by_key_and_are_whole_images() -> None:
    drawn = {draw(f"0/{i}") for i in range(20)}
    assert len(drawn) == 20
    with Image.open(io.BytesIO(drawn.pop())) as image:
        image.load()
        assert image.size == SIZE


def test_a_sliding_session_keeps_four_of_five_images_from_turn_to_turn_in_order() -> None:
    (phase,) = build("sliding-images", SMALL, 0)
    assert phase.concurrent and len(phase.sessions) == 3
    for session in phase.sessions:
        views = [images(session.messages(turn, ANSWERS)) for turn in range(4)]
        assert all(len(set(view)) == 5 for view in views)
        for before, after in pairwise(views):
            assert after[:4] == before[1:]
            assert after[4] not in before


def test_sliding_sessions_share_no_image() -> None:
    (phase,) = build("sliding-images", SMALL, 0)
    seen = [{i for t in s.turns for i in t.images} for s in phase.sessions]
    assert sum(map(len, seen)) == len(set().union(*seen)) == 3 * (5 + 3)


def test_dropped_images_leave_the_texts_and_answers_of_their_turns() -> None:
    session = build("sliding-images", SMALL, 0)[0].sessions[0]
    messages = session.messages(3, ANSWERS)
    assert [m.role for m in messages] == ["user", "assistant"] * 3 + ["user"]
    texts = [p.text for m in messages for p in m.parts if isinstance(p, TextPart)]
    assert texts == [turn.text for turn in session.turns]
    assert [m.parts for m in messages[1::2]] == [(TokensPart(a),) for a in ANSWERS]


@pytest.mark.parametrize("name", ["text", "one-image"])
def test_a_plain_session_sends_its_images_once_and_grows_by_its_turns(name: str) -> None:
    shape = replace(SMALL, images=0 if name == "text" else 1)
    (phase,) = build(name, shape, 0)
    for session in phase.sessions:
        early, late = session.messages(0, []), session.messages(1, ANSWERS)
        assert late[0] == early[0]
        assert len(images(late)) == shape.images
    assert len({s.turns for s in phase.sessions}) == 3


def test_the_same_image_is_new_once_and_then_in_every_session_behind_other_texts() -> None:
    phases = by_name(build("same-image-many-sessions", replace(SMALL, images=1), 0))
    assert [(p.name, p.concurrent) for p in phases.values()] == [
        ("cold", False),
        ("warm", False),
        ("load", True),
    ]
    cold = [opening(s)[0] for s in phases["cold"].sessions]
    assert len(set(cold)) == 3
    for name in ("warm", "load"):
        assert [opening(s) for s in phases[name].sessions] == [[cold[-1]]] * 3
    texts = [s.turns[0].text for phase in phases.values() for s in phase.sessions]
    assert len(set(texts)) == len(texts)
    assert {len(s.turns) for s in phases["load"].sessions} == {4}


def test_cached_images_come_back_in_other_orders_behind_new_text() -> None:
    phases = by_name(build("cached-images", SMALL, 0))
    known = opening(phases["cold"].sessions[-1])
    assert len({i for s in phases["cold"].sessions for i in opening(s)}) == 3 * 5
    orders = [opening(s) for s in phases["warm"].sessions]
    assert all(sorted(order) == sorted(known) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    for phase in phases.values():
        for session in phase.sessions:
            assert isinstance(session.messages(0, [])[0].parts[0], TextPart)


@pytest.mark.parametrize("name", WORKLOADS)
def test_only_the_workloads_about_images_have_some_and_those_must(name: str) -> None:
    with pytest.raises(ValueError, match="images in view"):
        build(name, replace(SMALL, images=1 if name == "text" else 0), 0)


def test_the_sliding_default_is_thirty_users_eight_turns_five_images() -> None:
    shape = WORKLOADS["sliding-images"].default
    assert (shape.sessions, shape.turns, shape.images) == (30, 8, 5)

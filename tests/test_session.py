"""Sessions: states survive JSON, pins and forgetting undo each other, cuts keep whole turns."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from mmserve.session import (
    FORGETTING,
    Forgetting,
    Line,
    SessionPolicy,
    SessionState,
    plan_cut,
    turns,
)

DIGESTS = [letter * 64 for letter in "abcdef"]
digests = st.sampled_from(DIGESTS)
policies = st.builds(
    SessionPolicy,
    st.none() | st.integers(1, 10**6),
    st.integers(0, 100),
    st.sampled_from(["all", "pinned"]) | st.integers(0, 9),
    st.booleans(),
)
states = st.builds(
    SessionState,
    policy=st.none() | policies,
    dropped=st.integers(0, 9),
    dropped_tokens=st.integers(0, 9),
    dropped_images=st.integers(0, 9),
    num_images=st.integers(0, 9),
    summary=st.none() | st.text(),
    missing=st.none() | st.text(),
    pinned=st.frozensets(digests),
    forgotten=st.dictionaries(digests, st.sampled_from(FORGETTING)),
)
lines = st.lists(
    st.builds(
        Line,
        st.sampled_from(["system", "head", "user", "user", "assistant", "assistant", "tool"]),
        st.integers(0, 60),
        st.lists(digests, max_size=3).map(tuple),
    ),
    max_size=20,
)
room = st.none() | st.integers(0, 12)


@given(states)
def test_a_state_is_the_same_after_json(state: SessionState) -> None:
    assert SessionState.from_json(json.loads(json.dumps(state.to_json()))) == state


@given(states, digests, st.sampled_from(FORGETTING))
def test_an_image_is_never_both_pinned_and_forgotten(
    state: SessionState, digest: str, how: Forgetting
) -> None:
    forgotten = state.forget(digest, how)
    assert forgotten.forgotten[digest] == how and digest not in forgotten.pinned
    pinned = forgotten.pin(digest)
    assert digest in pinned.pinned and digest not in pinned.forgotten
    assert digest not in pinned.unpin(digest).pinned


@given(states, digests)
def test_restoring_undoes_forgetting_and_touches_nothing_else(
    state: SessionState, digest: str
) -> None:
    before = state.unpin(digest).restore(digest)
    assert before.forget(digest, "mark").restore(digest) == before


def test_a_turn_is_what_stands_from_one_user_to_the_next() -> None:
    roles = ["system", "head", "assistant", "user", "user", "assistant", "tool", "system", "user"]
    assert turns([Line(role, 1) for role in roles]) == [2, 3, 8]


@given(states, lines, st.integers(2, 200), st.integers(0, 30), room)
def test_a_cut_keeps_whole_turns_and_at_most_half_the_window(
    state: SessionState, lines: list[Line], window: int, rest: int, max_images: int | None
) -> None:
    cut = plan_cut(state, lines, window=window, rest=rest, max_images=max_images)
    starts = turns(lines)
    assert cut.first in (*starts, len(lines))
    if starts:
        assert cut.first <= starts[-1], "the newest turn stays"
    fixed = sum(line.tokens for line in lines if line.fixed)
    kept = sum(line.tokens for line in lines[cut.first :] if not line.fixed)
    if starts and cut.first < starts[-1]:
        assert rest + fixed + kept <= window // 2


@given(states, lines, st.integers(2, 200), room)
def test_what_a_cut_keeps_of_dropped_turns_is_what_the_policy_says(
    state: SessionState, lines: list[Line], window: int, max_images: int | None
) -> None:
    cut = plan_cut(state, lines, window=window, max_images=max_images)
    policy = state.policy or SessionPolicy()
    assert list(cut.images) == sorted(set(cut.images)), "oldest first, each once"
    named = [lines[i].images[k] for i, k in cut.images]
    behind = [d for line in lines[: cut.first] if line.role != "system" for d in line.images]
    for digest in behind:
        if digest in state.pinned and digest not in state.forgotten:
            assert named.count(digest) == behind.count(digest), "pinned ones stay"
    assert not set(named) & set(state.forgotten)
    others = [digest for digest in named if digest not in state.pinned]
    if policy.images == "pinned":
        assert not others
    elif policy.images == "all" and max_images is None:
        assert named == [digest for digest in behind if digest not in state.forgotten]
    elif isinstance(policy.images, int):
        assert len(others) <= policy.images


def test_the_newest_images_are_kept_and_those_in_turns_that_stay_are_counted() -> None:
    state = SessionState(SessionPolicy(images=3))
    talk = [Line("user", 10, (digest,)) for digest in DIGESTS]
    mixed = [line for said in talk for line in (said, Line("assistant", 10))]
    cut = plan_cut(state, mixed, window=80)  # two turns of 20 stay
    assert cut.first == 8 and cut.images == ((6, 0),)
    assert plan_cut(state, mixed, window=80, max_images=2).images == ()


@given(lines, st.integers(2, 200))
def test_what_was_cut_needs_no_further_cut(lines: list[Line], window: int) -> None:
    state = SessionState()
    cut = plan_cut(state, lines, window=window)
    rest = [line for line in lines[: cut.first] if line.fixed] + lines[cut.first :]
    again = plan_cut(state, rest, window=window)
    assert turns(rest)[:1] == ([again.first] if turns(rest) else [])

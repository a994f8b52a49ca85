"""Cutting histories: nothing is lost uncounted, and numbers stay."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from mmserve.prompt import TextPart
from mmserve.server.blobs import MemoryBlob
from mmserve.server.history import Entry, History, Item, Late, StoredImage
from mmserve.server.window import Budget, cut, dropped, shorter, text_tokens, trim
from mmserve.session import Forgetting, SessionPolicy, SessionState

BLOBS = [MemoryBlob(bytes([i])) for i in range(6)]
policies = st.builds(
    SessionPolicy,
    window=st.integers(40, 400),
    images=st.sampled_from(["all", "pinned", 0, 1, 3]),
    summary=st.booleans(),
)


@st.composite
def histories(draw: st.DrawFn) -> History:
    history = History(state=SessionState(draw(st.none() | policies)))
    turns = draw(st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=8))
    for i, shown in enumerate(turns):
        role = draw(st.sampled_from(["user", "user", "user", "system"]))
        images = tuple(StoredImage(BLOBS[n], "input") for n in shown if role == "user")
        said = Item(f"u{i}", role, (TextPart("x"), *images), tokens=draw(st.integers(0, 60)))
        history = history.add((said,))
        if i < len(turns) - 1:
            answer = Item(f"a{i}", "assistant", (), tokens=draw(st.integers(0, 60)))
            history = history.add((answer,))
            history = replace(history, entries=tuple(Entry(e.item) for e in history.entries))
    pins = frozenset(BLOBS[n].digest.hex() for n in draw(st.sets(st.integers(0, 5), max_size=2)))
    return replace(history, state=replace(history.state, pinned=pins))


def numbers(history: History) -> list[int]:
    return [image.number or 0 for image in history.all_images]


limits = st.none() | st.integers(0, 10)


@given(histories(), st.integers(20, 300), st.integers(0, 50), limits)
def test_a_cut_counts_all_that_it_drops(
    history: History, window: int, rest: int, limit: int | None
) -> None:
    left = cut(history, window, rest, limit)
    gone = [entry for entry in history.entries if entry not in left.entries]
    assert left.state.dropped == len(gone)
    assert left.state.dropped_tokens == sum(entry.item.tokens for entry in gone)
    assert left.state.dropped_images == len(history.all_images) - len(left.all_images)
    assert left.new == history.new, "nothing of the request itself is dropped"
    assert numbers(left) == sorted(set(numbers(left))) and set(numbers(left)) <= set(
        numbers(history)
    )
    assert left.state.num_images == history.state.num_images
    pinned = [i for i in history.all_images if i.digest in history.state.pinned]
    assert [i for i in left.all_images if i.digest in history.state.pinned] == pinned


forgotten = st.dictionaries(st.integers(0, 5), st.sampled_from(["mark", "recompute"]))


@given(histories(), st.integers(20, 300), forgotten)
def test_of_forgotten_images_a_cut_remembers_those_that_stay(
    history: History, window: int, numbers: dict[int, Forgetting]
) -> None:
    digests = {BLOBS[n].digest.hex(): how for n, how in numbers.items()}
    history = replace(history, state=replace(history.state, forgotten=digests))
    left = cut(history, window)
    if left is not history:
        present = {image.digest for image in left.all_images}
        assert left.state.forgotten == {d: digests[d] for d in digests.keys() & present}


@given(histories(), st.integers(20, 300))
def test_what_a_cut_dropped_is_where_the_history_began(history: History, window: int) -> None:
    left = cut(history, window)
    gone = dropped(history, left).entries
    assert gone == history.entries[: len(gone)]
    spoken = [entry for entry in gone if entry.item.role != "system"]
    assert len(spoken) == left.state.dropped


@given(histories(), st.integers(20, 300))
def test_a_second_cut_at_once_drops_nothing_more(history: History, window: int) -> None:
    bare = replace(history, state=SessionState(SessionPolicy(images=0)))  # labels are text, too
    left = cut(bare, window)
    again = cut(left, window)
    assert again.state.dropped == left.state.dropped


@given(histories())
def test_shorter_histories_lose_turn_by_turn_and_end_with_the_newest(history: History) -> None:
    tried = list(shorter(history))
    assert tried[0] is history
    counts = [each.state.dropped for each in tried]
    assert counts == sorted(counts)
    assert all(each.new == history.new for each in tried)
    spoken = [entry for entry in tried[-1].entries if entry.item.role != "system"]
    assert len([entry for entry in spoken if entry.item.role == "assistant"]) == 0


@given(st.integers(0, 64), st.integers(0, 64))
def test_images_that_outgrow_their_room_go_down_to_half_of_it(count: int, each: int) -> None:
    budget = Budget(window=400, room=320)
    limit = budget.max_images(count, each)
    assert limit * each <= budget.room and limit * 5 <= budget.window // 4
    if count * each > budget.room or count * 5 > budget.window // 4:
        assert limit * each <= budget.room // 2 and limit * 5 <= budget.window // 8
    elif count <= limit:
        assert budget.max_images(limit // 2, each) >= limit // 2


@given(histories(), st.integers(0, 500))
def test_a_prompts_real_size_sets_the_estimate_right(history: History, more: int) -> None:
    bare = replace(history, state=SessionState(SessionPolicy(images=0)))  # labels are text, too
    left = trim(bare, Budget(window=200, room=10**6), text_tokens(bare) + more, 0)
    turns = [entry for entry in left.entries if entry.item.role != "system"]
    if any(entry.old for entry in turns):  # more than the newest turn
        assert text_tokens(left) + more <= 100 or left is bare


def test_a_late_summary_is_taken_in_by_the_next_cut_alone() -> None:
    state = SessionState(SessionPolicy(window=40, summary=True), summary="old")
    items = [Item(f"{i}", role, (), tokens=30) for i in range(4) for role in ("user", "assistant")]
    entries = tuple(map(Entry, items))
    history = History(entries, state=state, late=Late("new"))
    left = cut(history, 100)
    assert left.state.summary == "new" and left.state.missing is not None
    assert left.late is not None and left.late.text is None
    assert cut(replace(history, late=Late()), 100).state.summary == "old"

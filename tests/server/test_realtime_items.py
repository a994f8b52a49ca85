"""A Realtime conversation behaves as a plain list would, and refuses by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.errors import RequestError
from mmserve.prompt import TextPart
from mmserve.server.blobs import MemoryBlob
from mmserve.server.history import Item, StoredImage
from mmserve.server.realtime_items import ROOT, Conversation, Placed, cut_points, without

IDS = st.sampled_from([f"item_{n}" for n in range(6)])
PREVIOUS = st.one_of(st.none(), st.just(ROOT), IDS)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), IDS, PREVIOUS),
        st.tuples(st.just("begin"), IDS, st.none()),
        st.tuples(st.just("finish"), IDS, st.none()),
        st.tuples(st.just("delete"), IDS, st.none()),
        st.tuples(st.just("leave out"), IDS, st.none()),
    )
)


def item(id: str, role: str = "user", text: str = "hello") -> Item:
    return Item(id, role, (TextPart(text),))


def code(work: Any, *args: Any) -> str:
    with pytest.raises(RequestError) as refused:
        work(*args)
    return refused.value.code


def add(conversation: Conversation, id: str, previous: str | None) -> str | None:
    conversation.check(item(id), previous)
    return conversation.add(item(id), previous)


@given(steps=STEPS)
def test_it_is_a_list_with_named_places(steps: list[tuple[str, str, str | None]]) -> None:
    conversation = Conversation()
    ids: list[str] = []
    writing: set[str] = set()
    out: set[str] = set()
    for step, id, previous in steps:
        known = id in ids
        if step == "add" and previous not in (None, ROOT, *ids):
            assert code(add, conversation, id, previous) == "invalid_previous_item_id"
        elif step == "add" and known:
            assert code(add, conversation, id, previous) == "item_id_exists"
        elif step == "add":
            index = {None: len(ids), ROOT: 0}.get(previous, -1)
            index = index if index >= 0 else ids.index(previous or "") + 1
            ids.insert(index, id)
            assert add(conversation, id, previous) == (ids[index - 1] if index else None)
        elif step == "begin" and not known:
            assert conversation.begin(item(id)) == (ids[-1] if ids else None)
            ids.append(id)
            writing.add(id)
        elif step == "finish" and id in writing:
            index = ids.index(id)
            before = ids[index - 1] if index else None
            assert conversation.finish(item(id), "incomplete") == before
            writing.remove(id)
        elif step == "delete" and not known:
            assert code(conversation.delete, id) == "item_not_found"
        elif step == "delete" and id in writing:
            assert code(conversation.delete, id) == "invalid_value"
        elif step == "delete":
            conversation.delete(id)
            ids.remove(id)
            out.discard(id)
        elif step == "leave out" and id not in writing:
            conversation.leave_out({id})
            out |= {id} & set(ids)
        assert conversation.last_id == (ids[-1] if ids else None)
        shown = [each.id for each in conversation.context()]
        assert shown == [each for each in ids if each not in writing | out]


@given(st.lists(st.sampled_from(["user", "assistant", "system"]), max_size=8))
def test_a_cut_keeps_the_end_the_system_and_begins_where_a_user_does(roles: list[str]) -> None:
    items = [item(f"item_{i}", role) for i, role in enumerate(roles)]
    points = cut_points(items)
    assert points == sorted(set(points)) and 0 not in points
    for start in points:
        assert items[start].role == "user" or start == len(items) - 1
        kept = without(items, start)
        assert kept[-1] == items[-1]
        assert [k for k in kept if k.role == "system"] == [i for i in items if i.role == "system"]
        assert len(kept) < len(items) or all(i.role == "system" for i in items[:start])


def test_only_texts_are_cut_and_their_tokens_are_no_longer_exact() -> None:
    conversation = Conversation()
    image = StoredImage(MemoryBlob(b"png"), "item.content[0]")
    conversation.add(Item("a", "user", (image, TextPart("What is 狗?"))))
    conversation.begin(Item("b", "assistant", (TextPart("A dog."),), token_ids=(1, 2)))
    assert code(conversation.truncate, "b", 0, 1) == "invalid_value"
    conversation.finish(
        Item("b", "assistant", (TextPart("A dog."),), token_ids=(1, 2)), "completed"
    )
    assert code(conversation.truncate, "a", 0, 1) == "invalid_value"
    assert code(conversation.truncate, "a", 2, 1) == "invalid_value"
    assert code(conversation.truncate, "a", 1, 11) == "invalid_value"
    conversation.truncate("a", 1, 9)
    conversation.truncate("b", 0, 5)
    first, second = conversation.context()
    assert first.parts == (replace(image, number=1, item_id="a"), TextPart("What is 狗"))
    assert (second.parts, second.token_ids) == ((TextPart("A dog"),), None)


def test_an_image_is_called_the_same_whatever_becomes_of_others() -> None:
    conversation = Conversation()
    image = StoredImage(MemoryBlob(b"png"), "p")
    conversation.add(Item("a", "user", (image, image)))
    conversation.add(Item("b", "user", (image,)))
    conversation.delete("a")
    conversation.add(Item("c", "user", (image,)), ROOT)
    numbers = [image.number for item in conversation.context() for image in item.images]
    assert numbers == [4, 3]


def test_inline_images_count_and_uploads_do_not() -> None:
    blob = MemoryBlob(b"x" * 5000)
    inline, upload = StoredImage(blob, "p"), StoredImage(blob, "p", file_id="file_1")
    sizes = [Placed(Item("a", "user", (image,))).num_bytes for image in (inline, upload)]
    assert sizes[0] - sizes[1] == 5000

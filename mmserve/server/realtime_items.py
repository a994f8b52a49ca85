"""A Realtime conversation: one list of items that is appended to, inserted into, cut and shortened.

Owns the items' order, ids and states, and what of them a prompt is made of. Knows nothing of
events, sockets or engines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from mmserve.config import MIB
from mmserve.errors import RequestError
from mmserve.prompt import TextPart
from mmserve.server.errors import NotFoundError, RequestTooLargeError
from mmserve.server.history import Item, StoredImage, number
from mmserve.server.wire import new_id

ROOT = "root"  # as a previous item: the beginning
MAX_BYTES = 64 * MIB  # of texts and inline images of one conversation
ITEM_BYTES = 512  # that an item costs beside its content


@dataclass(frozen=True)
class Placed:
    """An item in its conversation. `left_out`: truncation has taken it out of all prompts."""

    item: Item
    status: str = "completed"  # in_progress | completed | incomplete
    left_out: bool = False

    @property
    def num_bytes(self) -> int:
        """What it holds in memory; an uploaded file's bytes are somebody else's."""
        size = ITEM_BYTES
        for part in self.item.parts:
            if isinstance(part, TextPart):
                size += len(part.text)
            elif part.file_id is None:
                size += part.blob.size
        return size


class Conversation:
    """The items by order and by id. An item in progress belongs to the response that writes it."""

    def __init__(self) -> None:
        self.id = new_id("conv")
        self._places: list[Placed] = []
        self._num_images = 0  # that have come in all: what the next is called does not change

    @property
    def last_id(self) -> str | None:
        return self._before(len(self._places))

    def _index(self, id: str, param: str) -> int:
        for index, placed in enumerate(self._places):
            if placed.item.id == id:
                return index
        raise NotFoundError(
            f"Item with id '{id[:100]}' is not in this conversation.",
            param=param,
            code="item_not_found",
        )

    def _index_after(self, previous: str | None) -> int:
        if previous is None:
            return len(self._places)
        if previous == ROOT:
            return 0
        try:
            return self._index(previous, "previous_item_id") + 1
        except NotFoundError as error:
            raise RequestError(
                error.message, param=error.param, code="invalid_previous_item_id"
            ) from None

    def get(self, id: str, param: str = "item_id") -> Placed:
        return self._places[self._index(id, param)]

    def check(self, item: Item, previous: str | None) -> None:
        """Raises what is wrong with either id, and `RequestTooLargeError`."""
        self._index_after(previous)
        if item.id == ROOT or any(placed.item.id == item.id for placed in self._places):
            raise RequestError(
                f"There is an item with id '{item.id[:100]}' already.",
                param="item.id",
                code="item_id_exists",
            )
        needed = sum(p.num_bytes for p in self._places if not p.left_out)
        if needed + Placed(item).num_bytes > MAX_BYTES:
            raise RequestTooLargeError(
                f"A conversation may hold {MAX_BYTES // MIB} MiB of texts and inline images; "
                "delete items, or upload images and name them by file_id.",
                param="item",
            )

    def add(self, item: Item, previous: str | None = None) -> str | None:
        """Put a checked item behind `previous`, or at the end; returns the id before it. What has
        been left out of all prompts goes for good where there is no room for both."""
        (item,), self._num_images = number((item,), self._num_images)
        placed = Placed(item)
        excess = sum(p.num_bytes for p in self._places) + placed.num_bytes - MAX_BYTES
        for old in [p for p in self._places if p.left_out and p.item.id != previous]:
            if excess <= 0:
                break
            self._places.remove(old)
            excess -= old.num_bytes
        index = self._index_after(previous)
        self._places.insert(index, placed)
        return self._before(index)

    def begin(self, item: Item) -> str | None:
        """A response begins an item, at the end; returns the id before it."""
        self._places.append(Placed(item, "in_progress"))
        return self._before(len(self._places) - 1)

    def finish(self, item: Item, status: str) -> str | None:
        """An item in progress has got its content; returns the id before it."""
        index = self._index(item.id, "item_id")
        self._places[index] = Placed(item, status)
        return self._before(index)

    def _before(self, index: int) -> str | None:
        return self._places[index - 1].item.id if index else None

    def _settled(self, id: str) -> int:
        index = self._index(id, "item_id")
        if self._places[index].status == "in_progress":
            raise RequestError(
                "This item is still being written; cancel its response first.", param="item_id"
            )
        return index

    def delete(self, id: str) -> None:
        del self._places[self._settled(id)]

    def truncate(self, id: str, content_index: int, text_end: int) -> None:
        """Cut a text part behind `text_end` code points."""
        index = self._settled(id)
        item = self._places[index].item
        part = item.parts[content_index] if content_index < len(item.parts) else None
        if not isinstance(part, TextPart) or item.call is not None:
            raise RequestError(
                f"Part {content_index} of this item is no text.", param="content_index"
            )
        if text_end > len(part.text):
            raise RequestError(f"The text has {len(part.text)} characters.", param="text_end")
        parts = list(item.parts)
        parts[content_index] = TextPart(part.text[:text_end])
        shorter = replace(item, parts=tuple(parts), token_ids=None)
        self._places[index] = replace(self._places[index], item=shorter)

    def context(self) -> list[Item]:
        """What a prompt is made of: all that is whole and has not been left out."""
        return [p.item for p in self._places if p.status != "in_progress" and not p.left_out]

    def leave_out(self, ids: Collection[str]) -> None:
        """Take items out of all prompts from now on; they can still be retrieved."""
        self._places = [replace(p, left_out=True) if p.item.id in ids else p for p in self._places]


@dataclass(frozen=True)
class Dropped:
    """What a truncation took out of the prompts. `tokens` is None where it could not be counted."""

    items: tuple[Item, ...] = ()
    tokens: int | None = 0

    def and_also(self, items: Iterable[Item], tokens: int | None) -> Dropped:
        known = None if self.tokens is None or tokens is None else self.tokens + tokens
        return Dropped((*self.items, *items), known)

    def to_json(self) -> dict[str, Any]:
        return {
            "dropped_items": [item.id for item in self.items],
            "dropped_images": sum(len(item.images) for item in self.items),
            "dropped_tokens": self.tokens,
        }


def cut_points(items: list[Item]) -> list[int]:
    """Where a shortened context may begin: at a user's item, or at the last resort the last."""
    starts = [i for i, item in enumerate(items) if i and item.role == "user"]
    last = len(items) - 1
    return starts if last < 1 or last in starts else [*starts, last]


def without(items: list[Item], start: int) -> list[Item]:
    """The items from `start` on, behind the system's."""
    return [item for item in items[:start] if item.role == "system"] + items[start:]


async def item_json(item: Item, status: str, with_urls: bool = False) -> dict[str, Any]:
    """An item in Realtime's words; images as data URLs only where asked."""
    body = await item.to_json(with_urls) | {"object": "realtime.item", "status": status}
    if "content" in body:
        body["content"] = [_part_json(part) for part in body["content"]]
    return body


def _part_json(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "output_text":
        return {"type": "output_text", "text": part["text"]}
    if part.get("detail") == "original":  # a word of the other surfaces
        part = {**part, "detail": "high"}
    return {name: value for name, value in part.items() if value is not None}


def has_images(item: Item) -> bool:
    return any(isinstance(part, StoredImage) for part in item.parts)

"""Items and histories, and how a history becomes messages again: earlier answers as their exact
tokens, images from their blobs, a summary and kept images for what was dropped. Knows nothing of
turns, of transports or of where items are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mmserve.prompt import ImagePart, Message, Part, TextPart, TokensPart
from mmserve.server.blobs import Blob
from mmserve.server.images import data_url
from mmserve.session import Forgetting, SessionState

SUMMARY = "Summary of the earlier part of this conversation, written by the model:"

Forgotten = Mapping[str, Forgetting]  # by digest
NOTHING: Forgotten = {}
LEFT_OF: dict[Forgetting | None, Literal["shown", "marked", "gone"]] = {
    None: "shown",
    "mark": "marked",
    "recompute": "gone",
}


@dataclass(frozen=True)
class StoredImage:
    """An image of a stored turn; `param` is the field it came from, `number` what the conversation
    calls it (None: one more than the one before it), `item_id` the item that it came with."""

    blob: Blob
    param: str
    detail: str = "auto"
    file_id: str | None = None
    number: int | None = None
    item_id: str | None = None

    @property
    def digest(self) -> str:
        """SHA-256 of the file, hexadecimal."""
        return self.blob.digest.hex()

    async def message_part(self, old: bool, forgotten: Forgotten = NOTHING) -> ImagePart:
        """`old`: from an earlier request."""
        param = "previous_response_id" if old else self.param
        state = LEFT_OF[forgotten.get(self.digest)]
        data = b"" if state == "gone" else await self.blob.read()
        how: dict[str, Any] = {"earlier": old, "number": self.number, "detail": self.detail}
        return ImagePart(data, param, state=state, **how)

    async def to_json(self, with_url: bool) -> dict[str, Any]:
        part: dict[str, Any] = {"type": "input_image", "detail": self.detail}
        part["file_id"] = self.file_id
        part["sha256"] = self.digest
        if with_url:
            part["image_url"] = data_url(await self.blob.read())
        return part


@dataclass(frozen=True)
class Item:
    """One message of a conversation. `token_ids`: an answer's exact tokens, used for its text.
    `tokens`: how many its text takes, without what a template writes around it."""

    id: str
    role: str  # system | user | assistant | tool
    parts: tuple[TextPart | StoredImage, ...]
    token_ids: tuple[int, ...] | None = None
    call: dict[str, Any] | None = None  # the JSON of a function call or its output
    tokens: int = 0

    @property
    def is_call(self) -> bool:
        return self.call is not None and self.role == "assistant"

    @property
    def images(self) -> list[StoredImage]:
        return [part for part in self.parts if isinstance(part, StoredImage)]

    async def to_json(self, with_urls: bool = False) -> dict[str, Any]:
        if self.call is not None:
            return {"id": self.id, "status": "completed", **self.call}
        content: list[dict[str, Any]] = []
        for part in self.parts:
            if isinstance(part, StoredImage):
                content.append(await part.to_json(with_urls))
            elif self.role == "assistant":
                content.append({"type": "output_text", "text": part.text, "annotations": []})
            else:
                content.append({"type": "input_text", "text": part.text})
        return {
            "id": self.id,
            "type": "message",
            "role": self.role,
            "status": "completed",
            "content": content,
        }

    async def message_parts(self, old: bool, forgotten: Forgotten = NOTHING) -> tuple[Part, ...]:
        """As the prompt builder wants them; `old`: from an earlier request."""
        if self.token_ids is not None:
            return (TokensPart(self.token_ids),)
        parts: list[Part] = []
        for part in self.parts:
            if isinstance(part, StoredImage):
                parts.append(await part.message_part(old, forgotten))
            else:
                parts.append(part)
        return tuple(parts)


def number(items: tuple[Item, ...], count: int) -> tuple[tuple[Item, ...], int]:
    """Their images called on from `count`, and how many have come then."""
    numbered = []
    for item in items:
        parts: list[TextPart | StoredImage] = []
        for part in item.parts:
            if isinstance(part, StoredImage):
                count += 1
                part = replace(part, number=count, item_id=item.id)
            parts.append(part)
        numbered.append(replace(item, parts=tuple(parts)))
    return tuple(numbered), count


@dataclass(frozen=True)
class Entry:
    """An item in its history. `open`: a prefill ended here; the next user item goes on with it."""

    item: Item
    open: bool = False
    old: bool = True


@dataclass(eq=False)
class Late:
    """A summary in the making, for those who went on before it was there."""

    text: str | None = None


@dataclass(frozen=True)
class History:
    """What a conversation still holds: `entries`, and `images` of turns that were dropped. `late`:
    the summary that it was cut without."""

    entries: tuple[Entry, ...] = ()
    images: tuple[StoredImage, ...] = ()
    state: SessionState = field(default_factory=SessionState)
    late: Late | None = None

    def add(self, items: tuple[Item, ...]) -> History:
        """With the items of a new request; a forgotten image that comes again is shown again."""
        items, count = number(items, self.state.num_images)
        entries = (*self.entries, *(Entry(item, old=False) for item in items))
        state = replace(self.state, num_images=count)
        for image in (image for item in items for image in item.images):
            state = state.restore(image.digest)
        return replace(self, entries=entries, state=state)

    @property
    def new(self) -> tuple[Item, ...]:
        """The items of the request that is being made."""
        return tuple(entry.item for entry in self.entries if not entry.old)

    @property
    def before(self) -> History:
        """What the request that is being made goes on from."""
        return replace(self, entries=tuple(entry for entry in self.entries if entry.old))

    @property
    def shown(self) -> list[StoredImage]:
        """The images that can be read, oldest first."""
        return [i for i in self.all_images if i.digest not in self.state.forgotten]

    @property
    def all_images(self) -> list[StoredImage]:
        """Also those that are forgotten."""
        own = (image for entry in self.entries for image in entry.item.images)
        return [*self.images, *own]

    async def head(self) -> tuple[Part, ...]:
        """What stands for the turns that were dropped."""
        parts: list[Part] = []
        if self.state.summary is not None:
            parts.append(TextPart(f"{SUMMARY}\n{self.state.summary}"))
        for image in self.images:
            if self.state.forgotten.get(image.digest) != "recompute":
                parts.append(await image.message_part(True, self.state.forgotten))
        return tuple(parts)


async def render(history: History, instructions: str | None) -> list[Message]:
    """A history as messages; a user turn that was prefilled in pieces is one message again, and
    so is what an answer said and called. What stands for dropped turns begins the first turn, as
    many templates take no two messages of a user in a row."""
    messages: list[Message] = []
    if instructions:
        messages.append(Message("system", (TextPart(instructions),)))
    head = await history.head()
    was_open = False
    for entry in history.entries:
        parts = await entry.item.message_parts(entry.old, history.state.forgotten)
        role = entry.item.role
        if head and role != "system":
            messages.append(Message("user", head))
            head, was_open = (), True
        # A call belongs to the assistant's turn that it was made in.
        continues = was_open if role == "user" else role == "assistant" and entry.item.is_call
        if continues and messages and messages[-1].role == role:
            messages[-1] = Message(role, messages[-1].parts + parts)
        else:
            messages.append(Message(role, parts))
        was_open = entry.open
    if head:
        messages.append(Message("user", head))
    return messages

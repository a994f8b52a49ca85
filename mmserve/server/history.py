"""Items and histories, and how a history becomes messages again: earlier answers as their exact
tokens, images from their blobs. Knows nothing of turns, of transports or of where items are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mmserve.prompt import ImagePart, Message, Part, TextPart, TokensPart
from mmserve.server.blobs import Blob
from mmserve.server.images import data_url


@dataclass(frozen=True)
class StoredImage:
    """An image of a stored turn; `param` is the field it came from."""

    blob: Blob
    param: str
    detail: str = "auto"
    file_id: str | None = None

    async def to_json(self, with_url: bool) -> dict[str, Any]:
        part: dict[str, Any] = {"type": "input_image", "detail": self.detail}
        part["file_id"] = self.file_id
        part["sha256"] = self.blob.digest.hex()
        if with_url:
            part["image_url"] = data_url(await self.blob.read())
        return part


@dataclass(frozen=True)
class Item:
    """One message of a conversation. `token_ids`: an answer's exact tokens, used for its text."""

    id: str
    role: str  # system | user | assistant | tool
    parts: tuple[TextPart | StoredImage, ...]
    token_ids: tuple[int, ...] | None = None
    call: dict[str, Any] | None = None  # the JSON of a function call or its output

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

    async def message_parts(self, old: bool) -> tuple[Part, ...]:
        """As the prompt builder wants them; `old`: from an earlier request."""
        if self.token_ids is not None:
            return (TokensPart(self.token_ids),)
        parts: list[Part] = []
        for part in self.parts:
            if isinstance(part, StoredImage):
                param = "previous_response_id" if old else part.param
                parts.append(ImagePart(await part.blob.read(), param, earlier=old))
            else:
                parts.append(part)
        return tuple(parts)


@dataclass(frozen=True)
class Entry:
    """An item in its history. `open`: a prefill ended here; the next user item goes on with it."""

    item: Item
    open: bool = False
    old: bool = True


async def render(entries: Iterable[Entry], instructions: str | None) -> list[Message]:
    """A history as messages; a user turn that was prefilled in pieces is one message again, and
    so is what an answer said and called."""
    messages: list[Message] = []
    if instructions:
        messages.append(Message("system", (TextPart(instructions),)))
    was_open = False
    for entry in entries:
        parts = await entry.item.message_parts(entry.old)
        role = entry.item.role
        # A call belongs to the assistant's turn that it was made in.
        continues = was_open if role == "user" else role == "assistant" and entry.item.is_call
        if continues and messages and messages[-1].role == role:
            messages[-1] = Message(role, messages[-1].parts + parts)
        else:
            messages.append(Message(role, parts))
        was_open = entry.open
    return messages

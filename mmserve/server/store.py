"""Stored responses: a tree of turns, found by id.

Owns items, turns, lineage, expiry and eviction, and how a history becomes messages again: earlier
answers as their exact tokens, images from their blobs. Knows nothing of transports.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from mmserve.config import MIB, ServerConfig
from mmserve.prompt import ImagePart, Message, Part, TextPart, TokensPart
from mmserve.server.blobs import Blob, BlobStore
from mmserve.server.errors import NotFoundError
from mmserve.server.images import data_url
from mmserve.server.job import Job
from mmserve.server.transcript import Transcript, function_call_json

LOG_BUDGET = 64 * MIB  # bytes of finished responses' event logs, all together


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


@dataclass(eq=False)
class Turn:
    """One response with what it answered. `carried`: history kept when older turns were cut off."""

    id: str
    owner: str
    items: tuple[Item, ...]
    parent: Turn | None = None
    carried: tuple[Entry, ...] = ()
    prefill: bool = False
    expires_at: float = 0.0
    job: Job | None = None  # until its log is evicted
    outputs: tuple[Item, ...] = ()
    spoken: tuple[Item, ...] = ()  # the outputs as a history shows them: one item, its exact tokens
    response: dict[str, Any] | None = None  # once ended

    def current(self) -> dict[str, Any]:
        """The Response object as it stands."""
        if self.response is not None:
            return self.response
        assert self.job is not None
        return self.job.transcript.response()

    @property
    def active(self) -> bool:
        return self.response is None

    def finish(self) -> None:
        """Take over what the job made."""
        assert self.job is not None
        transcript = self.job.transcript
        self.response = transcript.response()
        if not self.prefill and transcript.status != "failed":
            self.outputs = _outputs(transcript)
            tokens = transcript.answer.spliceable_tokens()
            self.spoken = self.outputs
            if tokens is not None and self.outputs:
                self.spoken = (replace(self.outputs[0], token_ids=tokens, call=None),)
                if len(self.outputs) == 1 and self.outputs[0].call is None:
                    self.outputs = self.spoken

    def history(self) -> list[Entry]:
        """Everything up to and including this turn, oldest first."""
        chain: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            chain.append(turn)
            turn = turn.parent
        entries = list(chain[-1].carried)
        for turn in reversed(chain):
            entries += [Entry(item) for item in turn.items]
            if turn.spoken:
                entries += [Entry(item) for item in turn.spoken]
            elif turn.prefill and entries:
                entries[-1] = Entry(entries[-1].item, open=True)
        return entries


def _outputs(transcript: Transcript) -> tuple[Item, ...]:
    """What was said, if anything, and each call."""
    answer, format = transcript.answer, transcript.calling.format
    said = Item(transcript.message_id, "assistant", (TextPart(answer.text),))
    items = [said] if answer.text or not answer.calls else []
    for id, call in zip(transcript.call_ids, answer.calls, strict=True):
        assert format is not None
        text = TextPart(format.call(call.name, call.arguments))
        items.append(Item(id, "assistant", (text,), call=function_call_json(call)))
    return tuple(items)


@dataclass
class ResponseStore:
    """Turns by id, each visible to its owner only; least recently used go first."""

    config: ServerConfig
    blobs: BlobStore
    _turns: OrderedDict[str, Turn] = field(default_factory=OrderedDict)
    _items: dict[tuple[str, str], Item] = field(default_factory=dict)
    _logs: OrderedDict[str, Turn] = field(default_factory=OrderedDict)
    _log_bytes: int = 0

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, turn: Turn) -> None:
        turn.expires_at = time.time() + self.config.store_ttl_s
        self._turns[turn.id] = turn
        self._index(turn.owner, turn.items)
        self.expire()

    def _index(self, owner: str, items: Iterable[Item]) -> None:
        for item in items:
            self._items[owner, item.id] = item

    def finished(self, turn: Turn) -> None:
        """Make an ended turn's answer referable, and keep its log while there is room."""
        if turn.id not in self._turns:
            return
        assert turn.job is not None
        self._index(turn.owner, turn.outputs)
        self._logs[turn.id] = turn
        self._log_bytes += turn.job.log.num_bytes
        while self._log_bytes > LOG_BUDGET:
            self._forget_log(next(iter(self._logs)))

    def _forget_log(self, id: str) -> None:
        turn = self._logs.pop(id, None)
        if turn is not None and turn.job is not None:
            self._log_bytes -= turn.job.log.num_bytes
            turn.job = None

    def find(self, id: str, owner: str) -> Turn | None:
        turn = self._turns.get(id)
        if turn is None or turn.owner != owner or turn.expires_at <= time.time():
            return None
        self._turns.move_to_end(id)
        return turn

    def get(self, id: str, owner: str) -> Turn:
        turn = self.find(id, owner)
        if turn is None:
            raise NotFoundError(
                f"Response with id '{id[:100]}' not found.",
                param="response_id",
                code="response_not_found",
            )
        return turn

    def item(self, id: str, owner: str) -> Item | None:
        return self._items.get((owner, id))

    def remove(self, id: str) -> None:
        """Forget a turn; turns that continue it keep what they need of it."""
        turn = self._turns.pop(id)
        for item in (*turn.items, *turn.outputs):
            self._items.pop((turn.owner, item.id), None)
        self._forget_log(id)

    def expire(self) -> None:
        """Drop what is too old, then the least recently used above the bounds."""
        now = time.time()
        for id in [turn.id for turn in self._turns.values() if turn.expires_at <= now]:
            self.remove(id)
        while len(self._turns) > self.config.max_stored_responses or (
            len(self._turns) > 1 and self.blobs.used_bytes > self.config.max_files_bytes
        ):
            self.remove(next(iter(self._turns)))

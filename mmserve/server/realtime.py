"""Realtime over WebSocket (surface D): one conversation of text and images, held by the server.

Owns one socket's session: its settings, its conversation and the responses that run for it, all of
which end with the socket. Client events are taken one after another, in the order they come.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

from mmserve.errors import RequestError, TooManyImagesError
from mmserve.prompt import Message, TextPart
from mmserve.server.content import ImageRef
from mmserve.server.deadline import Deadline
from mmserve.server.errors import RateLimitError, error_object, internal_error
from mmserve.server.event_log import EventLog, LogEvictedError
from mmserve.server.fields import Fields, once
from mmserve.server.history import Item, StoredImage
from mmserve.server.image_refs import of_item, sent
from mmserve.server.job import Job, Tail
from mmserve.server.realtime_events import TERMINAL, Reply, event
from mmserve.server.realtime_items import Conversation, Dropped, has_images, item_json
from mmserve.server.realtime_prompts import Fitted, Prompts, Started
from mmserve.server.realtime_session import RealtimeConfig, ResponseWish, UnsupportedModalityError
from mmserve.server.responder import LOG_BYTES
from mmserve.server.responses_request import MAX_ID, InputItem, parse_item
from mmserve.server.sampling import MAX_INT, check_model
from mmserve.server.services import Services, owner_of, services_of
from mmserve.server.sockets import SocketGoneError, SocketSession, deny, run_admitted
from mmserve.server.transcript import Transcript
from mmserve.server.wire import SlowReaderError, cancel, loads, new_id

MAX_EVENT_ID = 512  # characters
AUDIO = ("input_audio_buffer.", "output_audio_buffer.")

log = logging.getLogger("mmserve.server")


class RealtimeSession(SocketSession):
    """One socket. `_writer` is the response that may add to the conversation now."""

    def __init__(self, socket: WebSocket, services: Services) -> None:
        super().__init__(socket, services)
        self._owner = owner_of(socket)
        self._config = RealtimeConfig(services.info)
        self._conversation = Conversation()
        self._access = services.access(self._owner)
        self._prompts = Prompts(self._access)
        self._jobs: dict[str, Job] = {}  # running, by response
        self._tasks: set[asyncio.Task[None]] = set()
        self._writer: str | None = None
        self._ahead: asyncio.Task[None] | None = None  # computes the next prompt's layout
        self._dropped = Dropped()  # and not told yet
        self._changed = False  # the items, while a response was writing
        self._handlers: dict[str, Callable[[Fields], Awaitable[None]]] = {
            "session.update": self._update,
            "conversation.item.create": self._create_item,
            "conversation.item.retrieve": self._retrieve_item,
            "conversation.item.delete": self._delete_item,
            "conversation.item.truncate": self._truncate_item,
            "response.create": self._respond,
            "response.cancel": self._cancel,
        }

    async def run(self) -> None:
        await self.guarded(self.send(event("session.created", session=self._config.to_json())))
        await super().run()

    async def leave(self) -> None:
        await cancel(*self._tasks)
        if self._ahead is not None:  # the last task may have begun it
            await cancel(self._ahead)

    # In

    async def take(self, body: dict[str, Any], size: int) -> None:
        fields = Fields(body)
        id = fields.text("event_id")
        if id is not None and len(id) > MAX_EVENT_ID:
            raise RequestError("'event_id' is too long.", param="event_id")
        kind = fields.required("type")
        if isinstance(kind, str) and kind.startswith(AUDIO):
            raise UnsupportedModalityError("Audio is not spoken here.", param="type")
        handler = self._handlers.get(kind) if isinstance(kind, str) else None
        if handler is None:
            raise RequestError(
                f"Unknown event type '{str(kind)[:100]}'.", param="type", code="invalid_event_type"
            )
        try:
            await handler(fields)
        except (RequestError, SlowReaderError, SocketGoneError):
            raise
        except Exception:
            log.exception("%s failed", kind)
            raise internal_error() from None

    def error_event(self, error: RequestError, body: dict[str, Any] | None) -> dict[str, Any]:
        id = (body or {}).get("event_id")
        about = id if isinstance(id, str) and len(id) <= MAX_EVENT_ID else None
        return event("error", error={**error_object(error), "event_id": about})

    async def _update(self, fields: Fields) -> None:
        fields.required("session")
        self._config.update(fields.object("session"))
        await self.send(event("session.updated", session=self._config.to_json()))

    # Items

    async def _image(self, ref: ImageRef) -> StoredImage:
        if ref.item_id is not None:
            return of_item(ref, self._conversation.get(ref.item_id, ref.param).item)
        return await sent(ref, self.services, self._owner, store=False)

    async def _item(self, parsed: InputItem) -> Item:
        if parsed.reference is not None:
            return self._conversation.get(parsed.reference, parsed.param).item
        limit = self.services.info.image_limits.max_images
        if sum(isinstance(part, ImageRef) for part in parsed.content) > limit:
            raise TooManyImagesError(f"An item may have {limit} images.", param=parsed.param)
        parts: list[TextPart | StoredImage] = []
        for part in parsed.content:
            parts.append(await self._image(part) if isinstance(part, ImageRef) else part)
        return Item(parsed.id, parsed.role, tuple(parts), call=parsed.call)

    async def _new_item(self, fields: Fields) -> Item:
        parsed = parse_item(fields.required("item"), "item", self.services.info)
        if parsed is None or parsed.reference is not None:
            raise RequestError("An item is a message, a call or its output.", param="item.type")
        if parsed.role == "tool" and parsed.call is None:
            raise RequestError("A tool's output is a 'function_call_output'.", param="item.role")
        if parsed.role != "user" and any(isinstance(p, ImageRef) for p in parsed.content):
            raise RequestError("Images are in users' messages.", param="item.content")
        id = fields.object("item").text("id")
        if id is not None and not 0 < len(id) <= MAX_ID:
            raise RequestError(f"An item's id is 1 to {MAX_ID} characters.", param="item.id")
        return await self._item(parsed)

    async def _create_item(self, fields: Fields) -> None:
        item, previous = await self._new_item(fields), fields.text("previous_item_id")
        conversation = self._conversation
        conversation.check(item, previous)
        if has_images(item):  # refused now rather than by the next response
            parts = await item.message_parts(old=False)
            images = [part for part in parts if not isinstance(part, TextPart)]
            await self._access.prepare([Message("user", tuple(images))])
        appended = previous is None or previous == conversation.last_id
        before = conversation.add(item, previous)
        body = await item_json(item, "completed")
        for kind in ("added", "done"):
            name = f"conversation.item.{kind}"
            await self.send(event(name, previous_item_id=before, item=body))
        if has_images(item) or not appended:
            self._compute_ahead()

    async def _retrieve_item(self, fields: Fields) -> None:
        placed = self._conversation.get(_id(fields))
        body = await item_json(placed.item, placed.status, with_urls=True)
        await self.send(event("conversation.item.retrieved", item=body))

    async def _delete_item(self, fields: Fields) -> None:
        id = _id(fields)
        self._conversation.delete(id)
        await self.send(event("conversation.item.deleted", item_id=id))
        self._compute_ahead()

    async def _truncate_item(self, fields: Fields) -> None:
        names = ("content_index", "audio_end_ms", "text_end")
        for name in names[:2]:
            fields.required(name)
        content_index, audio_end_ms, text_end = (fields.integer(n, 0, MAX_INT) for n in names)
        assert content_index is not None
        if text_end is None:
            raise RequestError(
                "There is no audio to cut; 'text_end' says how many characters of the text stay.",
                param="text_end",
            )
        id = _id(fields)
        self._conversation.truncate(id, content_index, text_end)
        where = {"item_id": id, "content_index": content_index, "audio_end_ms": audio_end_ms}
        await self.send(event("conversation.item.truncated", **where, text_end=text_end))
        self._compute_ahead()

    # The next prompt, computed beforehand

    def _compute_ahead(self) -> None:
        """The items have changed, so that the next prompt is another. While a response writes, it
        is not known yet."""
        self._stop_ahead()
        self._changed = self._writer is not None
        if not self._changed:
            self._ahead = asyncio.ensure_future(self._prefill())

    def _stop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()

    async def _prefill(self) -> None:
        items = self._conversation.context()
        if not items:
            return
        id = new_id("ahead")
        try:
            generation, fitted = await self._prompts.start_ahead(id, items, self._config.settings)
        except RequestError as error:
            return log.debug("nothing is computed ahead: %s", error.message)  # the response says it
        self._leave_out(fitted)
        try:
            async for _ in generation:
                pass
        finally:
            generation.abort()

    def _leave_out(self, fitted: Fitted) -> None:
        """What found no room is out from now on, and the next response says so."""
        self._conversation.leave_out({item.id for item in fitted.left_out})
        self._dropped = self._dropped.and_also(fitted.left_out, fitted.dropped_tokens)

    # Responses

    async def _respond(self, fields: Fields) -> None:
        services, conversation = self.services, self._conversation
        services.check_ready()
        wish = self._config.wish(fields.object("response"), conversation.id)
        if wish.writes and self._writer is not None:
            raise RequestError(
                f"{self._writer} is writing to this conversation.",
                code="conversation_already_has_active_response",
            )
        limit = services.config.lanes_per_socket
        if len(self._jobs) >= limit:
            raise RateLimitError(f"This socket may have {limit} running responses.")
        if wish.writes:
            self._stop_ahead()  # this one computes it now
        deadline = Deadline.of({}, services.config.max_request_s)
        started, dropped, id = await self._start(wish)
        started = started._replace(generation=deadline.bind(started.generation))
        transcript = Transcript(id, {}, calling=wish.settings.calling)
        reply = Reply(
            transcript,
            conversation if wish.writes else None,
            head={
                "max_output_tokens": wish.settings.params.max_tokens or "inf",
                "metadata": wish.metadata or None,
            },
            session=dropped.to_json(),
        )
        self._run(reply, started)

    async def _start(self, wish: ResponseWish) -> tuple[Started, Dropped, str]:
        """Submit; what finds no room in the conversation is left out of it from now on."""
        id, own = new_id("resp"), wish.input is not None
        items = self._conversation.context()
        if wish.input is not None:
            items = [await self._item(parsed) for parsed in wish.input]
        started = await self._prompts.start(id, items, wish.settings, old=not own)
        fitted, dropped = started.fitted, Dropped()
        if own or not wish.writes:
            return started, dropped.and_also(fitted.left_out, fitted.dropped_tokens), id
        self._leave_out(fitted)
        dropped, self._dropped = self._dropped, dropped
        return started, dropped, id

    def _run(self, reply: Reply, started: Started) -> None:
        services, id = self.services, reply.transcript.id

        def on_done() -> None:
            services.jobs.discard(job)

        events = EventLog(services.config.max_log_events, LOG_BYTES)
        job = Job(reply.transcript, started.generation, events, grace_s=0.0, on_done=on_done)
        services.jobs.add(job)
        self._jobs[id] = job
        if reply.conversation is not None:
            self._writer = id
        tail = job.attach()
        task = asyncio.ensure_future(self.guarded(self._tell(reply, tail)))
        self._tasks.add(task)

        def gone(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            tail.close()  # also where the task was cancelled before it began

        task.add_done_callback(gone)

    async def _tell(self, reply: Reply, tail: Tail) -> None:
        try:
            async with aclosing(tail.events()) as logged:
                async for entry in logged:
                    events = list(reply.events(loads(entry.data)))
                    if entry.type in TERMINAL:  # before the client may know
                        self._ended(reply)
                    for each in events:
                        await self.send(each)
        except LogEvictedError:
            raise SlowReaderError from None
        finally:
            self._ended(reply)

    def _ended(self, reply: Reply) -> None:
        id = reply.transcript.id
        self._jobs.pop(id, None)
        if self._writer == id:
            self._writer = None
            usage = reply.transcript.answer.usage
            num_tokens = usage.prompt_tokens + usage.completion_tokens
            if self._changed or self._prompts.is_due(num_tokens, self._config.settings):
                self._compute_ahead()

    async def _cancel(self, fields: Fields) -> None:
        id = fields.text("response_id") or self._writer
        job = self._jobs.get(id) if id is not None else None
        if job is None or not job.active:
            raise RequestError(
                "There is no such running response."
                if fields.get("response_id")
                else "No response is being written to the conversation.",
                param="response_id",
                code="response_cancel_not_active",
            )
        job.cancel()


def _id(fields: Fields) -> str:
    fields.required("item_id")
    return fields.text("item_id") or ""


async def realtime_socket(socket: WebSocket) -> None:
    """WebSocket /v1/realtime."""
    try:
        info = services_of(socket).info
        check_model(Fields({"model": once(socket.query_params, "model") or None}), info)
    except RequestError as error:
        return await deny(socket, error)
    await run_admitted(socket, RealtimeSession)


ROUTES = [WebSocketRoute("/v1/realtime", realtime_socket)]

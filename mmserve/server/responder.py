"""From a checked Responses request to a running job: lineage, images, prompt, submission.

Shared by HTTP and WebSocket. Knows nothing of how events are delivered.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from dataclasses import replace

from mmserve.errors import RequestError, TooManyImagesError
from mmserve.prompt import Prompt, TextPart
from mmserve.server.content import ImageRef
from mmserve.server.deadline import Deadline
from mmserve.server.engine_face import Generation
from mmserve.server.errors import (
    NotFoundError,
    PreviousResponseNotFoundError,
    StorageUnavailableError,
)
from mmserve.server.event_log import EventLog
from mmserve.server.history import History, Item, StoredImage
from mmserve.server.image_refs import of_item, sent
from mmserve.server.job import Job
from mmserve.server.layout import Layout
from mmserve.server.responses_request import InputItem, ResponseRequest
from mmserve.server.services import Services
from mmserve.server.session_json import session_json
from mmserve.server.transcript import Transcript
from mmserve.server.turn import Turn
from mmserve.server.upkeep import Cut, Upkeep
from mmserve.server.wire import new_id

LOG_BYTES = 4 * 2**20  # of one response
LocalTurns = MutableMapping[str, Turn]


class Responder:
    """Starts responses for one owner. `local`: turns that only this connection may continue."""

    def __init__(self, services: Services, owner: str, local: LocalTurns | None = None) -> None:
        self._services = services
        self._owner = owner
        self._local: LocalTurns = {} if local is None else local

    def find(self, id: str) -> Turn | None:
        """A turn of this owner, or of this connection."""
        return self._local.get(id) or self._services.responses.find(id, self._owner)

    async def _parent(self, id: str | None) -> Turn | None:
        if id is None:
            return None
        await self._services.siblings.turn(id)
        turn = self.find(id)
        if turn is None:
            raise PreviousResponseNotFoundError(
                f"Previous response with id '{id[:100]}' not found.",
                param="previous_response_id",
            )
        if turn.active or turn.current()["status"] == "failed":
            state = "has not ended" if turn.active else "failed"
            raise RequestError(
                f"Previous response with id '{id[:100]}' {state}.", param="previous_response_id"
            )
        return turn

    async def _image(self, ref: ImageRef, store: bool) -> StoredImage:
        if ref.item_id is not None:
            return of_item(ref, self._known(ref.item_id, store))
        return await sent(ref, self._services, self._owner, store=store)

    def _known(self, id: str, store: bool) -> Item | None:
        """An item of this owner, or of this connection where nothing is stored of it."""
        turns = () if store else self._local.values()
        local = (item for turn in turns for item in turn.items if item.id == id)
        return self._services.responses.item(id, self._owner) or next(local, None)

    async def _item(self, item: InputItem, store: bool) -> Item:
        if item.reference is not None:
            known = self._services.responses.item(item.reference, self._owner)
            if known is None:
                raise NotFoundError(
                    f"Item with id '{item.reference[:100]}' not found.",
                    param=item.param,
                    code="item_not_found",
                )
            return known
        if item.role == "assistant":
            known = self._services.responses.item(item.id, self._owner)
            if known is not None and known.parts == item.content:
                return known  # sent back unchanged: its exact tokens are known
        parts: list[TextPart | StoredImage] = []
        for part in item.content:
            if isinstance(part, ImageRef):
                parts.append(await self._image(part, store))
            else:
                parts.append(part)
        return Item(item.id, item.role, tuple(parts), call=item.call)

    async def _items(self, request: ResponseRequest, store: bool) -> tuple[Item, ...]:
        limit = self._services.info.image_limits.max_images
        count = sum(isinstance(p, ImageRef) for item in request.items for p in item.content)
        if count > limit:
            raise TooManyImagesError(
                f"The request has {count} images; the limit is {limit}.", param="input"
            )
        items = [await self._item(item, store) for item in request.items]
        texts = ["\n".join(p.text for p in i.parts if isinstance(p, TextPart)) for i in items]
        counts = await self._services.engine.count(texts)
        return tuple(
            item if item.tokens else replace(item, tokens=count)
            for item, count in zip(items, counts, strict=True)
        )

    async def count(self, request: ResponseRequest) -> Prompt:
        """The prompt this request would make; nothing is stored."""
        access = self._services.access(self._owner)
        access.request()
        parent = await self._parent(request.previous_response_id)
        items = await self._items(request, store=False)
        layout = Layout(access.unasked, request, Deadline(None))
        return await layout.count(_history(parent, request).add(items))

    async def start(
        self, request: ResponseRequest, deadline: Deadline, *, grace_s: float | None
    ) -> Turn:
        """Check everything, submit, and return the turn with its running job."""
        self._services.check_ready()
        parent = await self._parent(request.previous_response_id)
        items = await self._items(request, request.store)
        history = _history(parent, request).add(items)
        id = new_id(self._services.config.prefix("resp"))
        # What was not to be stored must not reach the disk as the history of what is.
        durable = request.store and (parent is None or parent.durable)
        layout = Layout(self._services.access(self._owner), request, deadline)
        generation, laid = await layout.submit(id, history, durable=durable)
        if parent is not None:
            parent.continued = True
        turn = Turn(id, self._owner, laid.new, parent, prefill=request.prefill, durable=durable)
        turn.session = laid.state
        if laid is not history or (parent is not None and parent.kept is not None):
            turn.root = None if parent is None else parent.conversation
            turn.parent, turn.base = None, laid.before
        cuts = [] if laid is history else [Cut(history, laid)]
        job = self._run(turn, request, deadline.bind(generation), grace_s, laid, cuts)
        if request.store:
            await self._keep(turn, job)
        else:
            self._local[turn.id] = turn
        return turn

    async def _keep(self, turn: Turn, job: Job) -> None:
        """Store a turn that has begun; its prompt is computed meanwhile."""
        try:
            await self._services.responses.add(turn)
        except asyncio.CancelledError:
            job.attach().close()  # the reader that was to come has left
            raise
        except StorageUnavailableError:
            job.cancel()
            raise

    def _run(
        self,
        turn: Turn,
        request: ResponseRequest,
        generation: Generation,
        grace_s: float | None,
        laid: History,
        cuts: list[Cut],
    ) -> Job:
        """`cuts`: those that brought the history to what it is `laid` on."""
        services = self._services
        transcript = Transcript(
            turn.id,
            {**request.head, "session": session_json(laid, services.info)},
            calling=request.calling,
            prefill=request.prefill,
            logprobs=request.params.logprobs is not None,
        )

        upkeep = Upkeep(services, request.instructions, request.calling.described)

        async def settle() -> None:
            turn.finish()
            if transcript.status != "failed" and (cut := upkeep.cut(turn, transcript.answer)):
                cuts.append(cut)
            try:
                await services.responses.keep(turn)
            except StorageUnavailableError as error:
                transcript.fail(error.message)
                turn.outputs = turn.spoken = ()

        def on_done() -> None:
            turn.response = transcript.response()
            services.jobs.discard(job)
            services.responses.finished(turn)
            if cuts and transcript.status != "failed":
                services.spawn(upkeep.follow(turn, cuts))

        log = EventLog(services.config.max_log_events, LOG_BYTES)
        job = Job(transcript, generation, log, grace_s=grace_s, on_done=on_done, settle=settle)
        turn.job = job
        services.jobs.add(job)
        return job


def _history(parent: Turn | None, request: ResponseRequest) -> History:
    """What a request goes on from, under the policy that it has or inherits."""
    history = History() if parent is None else parent.history()
    return replace(history, state=request.policy.apply(history.state))

"""Stored responses: a tree of turns, found by id.

Owns turns, lineage, expiry and eviction. All turns are in memory; a journal keeps what must last.
Knows nothing of transports.
"""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy as sa

from mmserve.config import MIB, ServerConfig
from mmserve.prompt import TextPart
from mmserve.server import rows
from mmserve.server.blobs import BlobStore
from mmserve.server.errors import NotFoundError, StorageUnavailableError
from mmserve.server.history import Entry, History, Item, StoredImage, number
from mmserve.server.job import Job
from mmserve.server.journal import Database, Journal, NoJournal
from mmserve.server.transcript import Transcript, function_call_json
from mmserve.session import SessionState

log = logging.getLogger("mmserve.server")

LOG_BUDGET = 64 * MIB  # bytes of finished responses' event logs, all together
NO_PINS: frozenset[str] = frozenset()
INTERRUPTED = "The server stopped while it wrote this response."


@dataclass(eq=False)
class Turn:
    """One response with what it answered.

    `durable` where it and all before it may be written to the disk. `continued`: another turn of
    this process goes on from it. `base`: what is held of a
    conversation whose older turns were cut off; `session`: what the prompt was made by; `kept`:
    what is held after this turn, where it was cut at its end.
    """

    id: str
    owner: str
    items: tuple[Item, ...]
    parent: Turn | None = None
    base: History = History()
    session: SessionState = SessionState()
    kept: History | None = None
    continued: bool = False
    prefill: bool = False
    durable: bool = True
    removed: bool = False
    root: str | None = None  # of a conversation whose older turns were cut off: its name
    expires_at: float = 0.0
    job: Job | None = None  # until its log is evicted
    outputs: tuple[Item, ...] = ()
    spoken: tuple[Item, ...] = ()  # the outputs as a history shows them: one item, its exact tokens
    response: dict[str, Any] | None = None  # once ended and kept

    def current(self) -> dict[str, Any]:
        """The Response object as it stands."""
        if self.response is not None:
            return self.response
        assert self.job is not None
        response = self.job.transcript.response()
        if response["status"] != "in_progress":  # not kept yet, and so not to be told
            unknown = dict.fromkeys(("completed_at", "error", "incomplete_details"))
            response |= {**unknown, "status": "in_progress", "usage": None, "timings": None}
        return response

    @property
    def active(self) -> bool:
        return self.response is None

    def change(self, how: Callable[[SessionState], SessionState]) -> None:
        """What turns that continue this one from now on go by."""
        self.session = how(self.session)
        if self.kept is not None:
            self.kept = replace(self.kept, state=how(self.kept.state))

    @property
    def conversation(self) -> str:
        """A name for all turns that go back to one, however often it was cut in this process."""
        turn = self
        while turn.parent is not None:
            turn = turn.parent
        return turn.root or turn.id

    def finish(self) -> None:
        """Take over what the job made."""
        assert self.job is not None
        transcript = self.job.transcript
        if not self.prefill and transcript.status != "failed":
            self.outputs = _outputs(transcript)
            tokens = transcript.answer.spliceable_tokens()
            self.spoken = self.outputs
            if tokens is not None and self.outputs:
                self.spoken = (replace(self.outputs[0], token_ids=tokens, call=None),)
                if len(self.outputs) == 1 and self.outputs[0].call is None:
                    self.outputs = self.spoken

    def history(self) -> History:
        """What a turn that continues this one is laid on."""
        if self.kept is not None:
            return self.kept
        chain: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            chain.append(turn)
            turn = turn.parent
        entries = list(chain[-1].base.entries)
        for turn in reversed(chain):
            entries += [Entry(item) for item in turn.items]
            if turn.spoken:
                entries += [Entry(item) for item in turn.spoken]
            elif turn.prefill and entries:
                entries[-1] = Entry(entries[-1].item, open=True)
        return replace(chain[-1].base, entries=tuple(entries), state=self.session)


def _outputs(transcript: Transcript) -> tuple[Item, ...]:
    """What was said, if anything, and each call."""
    answer, format = transcript.answer, transcript.calling.format
    said = Item(transcript.message_id, "assistant", (TextPart(answer.text),))
    items = [said] if answer.text or not answer.calls else []
    for id, call in zip(transcript.call_ids, answer.calls, strict=True):
        assert format is not None
        text = TextPart(format.call(call.name, call.arguments))
        items.append(Item(id, "assistant", (text,), call=function_call_json(call)))
    items[0] = replace(items[0], tokens=len(answer.token_ids))  # of all of them together
    return tuple(items)


def _turn_row(turn: Turn) -> dict[str, Any]:
    question = {
        "items": rows.items_json(turn.items),
        **rows.history_json(turn.base),
        "prefill": turn.prefill,
        "response": turn.current(),
    }
    return {
        "id": turn.id,
        "owner": turn.owner,
        "parent_id": None if turn.parent is None else turn.parent.id,
        "hidden": False,
        "expires_at": turn.expires_at,
        "question": rows.to_text(question),
        "session": _session_text(turn),
    }


def _session_text(turn: Turn) -> str:
    body: dict[str, Any] = {"state": turn.session.to_json(), "kept": None}
    if turn.kept is not None:
        body["kept"] = {**rows.history_json(turn.kept), "state": turn.kept.state.to_json()}
    return rows.to_text(body)


def _answer_json(outputs: Iterable[Item], spoken: Iterable[Item], response: dict[str, Any]) -> str:
    return rows.to_text(
        {
            "outputs": rows.items_json(outputs),
            "spoken": rows.items_json(spoken),
            "response": response,
        }
    )


@dataclass
class ResponseStore:
    """Turns by id, each visible to its owner only; least recently used go first."""

    config: ServerConfig
    blobs: BlobStore
    journal: Journal = field(default_factory=NoJournal)
    # Told how the images that a stored turn has pinned change: its owner, before, after.
    on_pins: Callable[[str, frozenset[str], frozenset[str]], None] = lambda *_: None
    _turns: OrderedDict[str, Turn] = field(default_factory=OrderedDict)
    _items: dict[tuple[str, str], Item] = field(default_factory=dict)
    _logs: OrderedDict[str, Turn] = field(default_factory=OrderedDict)
    _log_bytes: int = 0

    def __len__(self) -> int:
        return len(self._turns)

    async def add(self, turn: Turn) -> None:
        """Take in a turn that has begun. Raises `StorageUnavailableError`."""
        turn.expires_at = time.time() + self.config.store_ttl_s
        if turn.parent is not None and turn.parent.removed:
            turn.root = turn.parent.conversation
            turn.base, turn.parent = turn.parent.history(), None
        self._turns[turn.id] = turn
        self._index(turn.owner, turn.items)
        self.on_pins(turn.owner, NO_PINS, turn.session.pinned)
        if turn.durable:
            commit = self.journal.write(rows.insert(rows.TURNS, **_turn_row(turn)))
            self.expire()
            try:
                await commit
            except StorageUnavailableError:
                if turn.id in self._turns:
                    self._forget(turn)
                raise
        else:
            self.expire()

    async def keep(self, turn: Turn) -> None:
        """What a turn's job made lasts once this returns. Raises `StorageUnavailableError`."""
        if turn.durable and turn.id in self._turns:
            assert turn.job is not None
            response = turn.job.transcript.response()
            answer = _answer_json(turn.outputs, turn.spoken, response)
            session = _session_text(turn)
            await self.journal.write(rows.change_turn(turn.id, answer=answer, session=session))

    async def keep_session(self, turn: Turn) -> None:
        """A turn's `session` and `kept` as they are now last once this returns.

        Raises `StorageUnavailableError`.
        """
        if turn.durable and turn.id in self._turns:
            await self.journal.write(rows.change_turn(turn.id, session=_session_text(turn)))

    async def change_session(self, turn: Turn, how: Callable[[SessionState], SessionState]) -> None:
        """As `Turn.change`, and for good once this returns. Raises `StorageUnavailableError`, and
        nothing has changed, or `NotFoundError` for a turn that has just gone: nobody would undo
        its pins."""
        self.get(turn.id, turn.owner)
        before = turn.session, turn.kept
        turn.change(how)
        self.on_pins(turn.owner, before[0].pinned, turn.session.pinned)
        try:
            await self.keep_session(turn)
        except StorageUnavailableError:
            if turn.id in self._turns:
                self.on_pins(turn.owner, turn.session.pinned, before[0].pinned)
            turn.session, turn.kept = before
            raise

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

    def forget_logs(self) -> None:
        """Of what has ended: it can still be retrieved, and no longer resumed."""
        while self._logs:
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

    def conversation(self, id: str) -> str | None:
        """What a response, or a request made for it (`upkeep.request_id`), belongs to, whoever
        asked for it; None: it is not stored."""
        turn = self._turns.get(id.rpartition(".")[2])
        return None if turn is None else turn.conversation

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

    def _forget(self, turn: Turn) -> None:
        del self._turns[turn.id]
        for item in (*turn.items, *turn.outputs):
            self._items.pop((turn.owner, item.id), None)
        self._forget_log(turn.id)
        self.on_pins(turn.owner, turn.session.pinned, NO_PINS)

    async def delete(self, turn: Turn) -> None:
        """As `remove`, and for good once this returns. Raises `StorageUnavailableError`."""
        turn.removed = True
        try:
            await self.journal.write(rows.remove_turn(turn.id))
        except StorageUnavailableError:
            turn.removed = False
            raise
        if turn.id in self._turns:
            self._forget(turn)

    def remove(self, id: str) -> None:
        """Drop a turn; turns that continue it keep what they need of it."""
        turn = self._turns[id]
        turn.removed = True
        self._forget(turn)
        self.journal.write(rows.remove_turn(id))

    def pinned(self) -> Iterator[tuple[str, StoredImage]]:
        """The images that stored turns have pinned, each once, with their owner."""
        found: set[tuple[str, str]] = set()
        for turn in list(self._turns.values()):
            for image in turn.history().shown if turn.session.pinned else ():
                name = turn.owner, image.digest
                if image.digest in turn.session.pinned and name not in found:
                    found.add(name)
                    yield turn.owner, image

    def restore(self, database: Database) -> None:
        """Take in what an earlier process kept; what has expired goes with the next `expire`.

        A turn that had not ended has failed.
        """
        known: dict[str, Turn] = {}
        for row in database.read(sa.select(rows.TURNS).order_by(rows.TURNS.c.number)):
            try:
                turn = self._turn(row, known)
            except KeyError:
                log.warning("%s has lost an image, or what it continues", row.id)
                continue
            known[turn.id] = turn
            if row.answer is None:
                assert turn.response is not None
                answer = _answer_json((), (), turn.response)
                database.write_now(rows.change_turn(turn.id, answer=answer))
            if not row.hidden:
                self._turns[turn.id] = turn
                self._index(turn.owner, (*turn.items, *turn.outputs))
                self.on_pins(turn.owner, NO_PINS, turn.session.pinned)

    def _turn(self, row: sa.Row[Any], known: dict[str, Turn]) -> Turn:
        question, find = json.loads(row.question), self.blobs.find
        turn = Turn(
            row.id,
            row.owner,
            rows.items(question["items"], find),
            None if row.parent_id is None else known[row.parent_id],
            prefill=question["prefill"],
            removed=row.hidden,
            expires_at=row.expires_at,
            base=rows.history(question, find),
        )
        if row.session is None:  # written before version 3
            count = 0 if turn.parent is None else turn.parent.session.num_images
            count += sum(len(entry.item.images) for entry in turn.base.entries)
            turn.items, count = number(turn.items, count)
            turn.session = SessionState(num_images=count)
        else:
            session = json.loads(row.session)
            turn.session = SessionState.from_json(session["state"])
            if (kept := session["kept"]) is not None:
                state = SessionState.from_json(kept["state"])
                turn.kept = replace(rows.history(kept, find), state=state)
        if row.answer is None:
            error = {"code": "server_error", "message": INTERRUPTED}
            turn.response = question["response"] | {"status": "failed", "error": error}
        else:
            answer = json.loads(row.answer)
            turn.outputs = rows.items(answer["outputs"], find)
            turn.spoken = rows.items(answer["spoken"], find)
            turn.response = answer["response"]
        return turn

    def expire(self) -> None:
        """Drop what is too old, then the least recently used above the bounds."""
        now = time.time()
        for id in [turn.id for turn in self._turns.values() if turn.expires_at <= now]:
            self.remove(id)
        while len(self._turns) > self.config.max_stored_responses or (
            len(self._turns) > 1 and self.blobs.used_bytes > self.config.max_files_bytes
        ):
            self.remove(next(iter(self._turns)))

"""Stored responses: a tree of turns, found by id.

Owns which turns there are, their expiry and eviction. All turns of this server are in memory; a
journal keeps what must last. Of turns that other servers keep in the same database (`shared.py`)
it has those that were asked for here. Knows nothing of transports.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import sqlalchemy as sa

from mmserve.config import MIB, ServerConfig
from mmserve.server import rows
from mmserve.server.blobs import BlobStore
from mmserve.server.errors import NotFoundError, StorageUnavailableError
from mmserve.server.history import Item, StoredImage
from mmserve.server.journal import Database, Journal, NoJournal
from mmserve.server.turn import Turn
from mmserve.server.turn_rows import answer_text, session_text, turn_of_row, turn_row
from mmserve.session import SessionState

log = logging.getLogger("mmserve.server")

LOG_BUDGET = 64 * MIB  # bytes of finished responses' event logs, all together
NO_PINS: frozenset[str] = frozenset()


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
            commit = self.journal.write(rows.insert(rows.TURNS, **turn_row(turn)))
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
            answer = answer_text(turn.outputs, turn.spoken, response)
            session = session_text(turn)
            await self.journal.write(rows.change_turn(turn.id, answer=answer, session=session))

    async def keep_session(self, turn: Turn) -> None:
        """A turn's `session` and `kept` as they are now last once this returns.

        Raises `StorageUnavailableError`.
        """
        if turn.durable and turn.id in self._turns:
            await self.journal.write(rows.change_turn(turn.id, session=session_text(turn)))

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
                turn = turn_of_row(row, known, self.blobs.find)
            except KeyError:
                log.warning("%s has lost an image, or what it continues", row.id)
                continue
            known[turn.id] = turn
            if row.answer is None:
                assert turn.response is not None
                answer = answer_text((), (), turn.response)
                database.write_now(rows.change_turn(turn.id, answer=answer))
            if not row.hidden:
                self._turns[turn.id] = turn
                self._index(turn.owner, (*turn.items, *turn.outputs))
                self.on_pins(turn.owner, NO_PINS, turn.session.pinned)

    def expire(self) -> None:
        """Drop what is too old, then the least recently used above the bounds."""
        now = time.time()
        for id in [turn.id for turn in self._turns.values() if turn.expires_at <= now]:
            self.remove(id)
        while len(self._turns) > self.config.max_stored_responses or (
            len(self._turns) > 1 and self.blobs.used_bytes > self.config.max_files_bytes
        ):
            oldest = next(iter(self._turns.values()))
            if oldest.foreign:
                self._forget(oldest)
            else:
                self.remove(oldest.id)

    # What other servers keep

    def here(self, id: str) -> Turn | None:
        """A turn in memory, whoever owns it."""
        return self._turns.get(id)

    def take(self, turn: Turn) -> None:
        """Have a turn as it lies in the database now, instead of what was here of it."""
        if (known := self._turns.get(turn.id)) is not None:
            self._forget(known)
        turn.foreign = True
        self._turns[turn.id] = turn
        self._index(turn.owner, (*turn.items, *turn.outputs))
        self.on_pins(turn.owner, NO_PINS, turn.session.pinned)

    def lost(self, turn: Turn) -> None:
        """Another server has removed it."""
        turn.removed = True
        self._forget(turn)

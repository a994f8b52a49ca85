"""What other servers keep in the same database and data folder, brought in when it is asked for.

A server among several (`ServerConfig.replica`) writes what is its own as a lone one does, and reads
what it is asked for: a conversation that began elsewhere goes on here. The database says what is
so; what is in memory of another's turn is looked at anew each time. Files whose bytes nobody names
any more are swept up by whoever comes by. Knows nothing of routes or of who else is alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import Protocol

import sqlalchemy as sa

from mmserve.server import rows
from mmserve.server.blobs import BlobStore
from mmserve.server.errors import StorageUnavailableError
from mmserve.server.files import FileStore, file_of_row
from mmserve.server.image_keeper import ImageKeeper
from mmserve.server.journal import Database, reason
from mmserve.server.store import ResponseStore
from mmserve.server.turn import Turn
from mmserve.server.turn_rows import session_text, turn_of_row

log = logging.getLogger("mmserve.server")

SWEEP_S = 300.0  # between two looks for what nobody names
ORPHAN_S = 3 * SWEEP_S  # what is held somewhere was touched since


class Siblings(Protocol):
    """Brings a turn or files as others have left them into this server's stores."""

    async def turn(self, id: str) -> None: ...
    async def file(self, id: str) -> None: ...
    async def files(self, owner: str) -> None: ...
    async def sweep(self) -> None: ...


class NoSiblings:
    """A server that is alone has everything already."""

    async def turn(self, id: str) -> None: ...
    async def file(self, id: str) -> None: ...
    async def files(self, owner: str) -> None: ...
    async def sweep(self) -> None: ...


class SharedStore:
    """Raises `StorageUnavailableError` where the database cannot be read."""

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        responses: ResponseStore,
        files: FileStore,
        images: ImageKeeper,
    ) -> None:
        self._database, self._blobs = database, blobs
        self._responses, self._files, self._images = responses, files, images
        self._swept = time.monotonic()

    async def _read(self, query: sa.Select[tuple[object, ...]]) -> list[sa.Row[tuple[object, ...]]]:
        try:
            return await asyncio.to_thread(self._database.read, query)
        except sa.exc.SQLAlchemyError as error:
            log.error("nothing was read: %s", reason(error))
            raise StorageUnavailableError(f"It cannot be read: {reason(error)}.") from error

    async def turn(self, id: str) -> None:
        known = self._responses.here(id)
        if known is not None and (known.active or not known.durable):
            return  # it runs here, or nobody else can know it
        found = await self._read(rows.turn(id))
        known = self._responses.here(id)
        if not found or found[0].hidden:
            if known is not None and not known.active:
                self._responses.lost(known)
        elif known is None or not _same(known, found[0]):
            await self._bring(id)

    async def _bring(self, id: str) -> None:
        line = await self._read(rows.lineage(id))
        lying = await asyncio.to_thread(self._blobs.lying)
        turns: dict[str, Turn] = {}
        try:
            for row in line:
                turns[row.id] = turn_of_row(row, turns, lambda d: self._blobs.find(d, lying))
        except (KeyError, FileNotFoundError):
            return log.warning("%s has lost an image, or what it continues", id)
        turn = turns.get(id)
        if turn is None or turn.removed:  # it went just now
            return
        self._responses.take(turn)
        if turn.session.pinned:
            shown = turn.history().shown
            pinned = [(turn.owner, i) for i in shown if i.digest in turn.session.pinned]
            await self._images.pin_again(pinned)

    async def file(self, id: str) -> None:
        if found := await self._read(rows.file(id)):
            await self._take_files(found)
        else:
            self._files.lost(id)

    async def files(self, owner: str) -> None:
        found = await self._read(rows.files_of(owner))
        for file in self._files.list(owner):
            if file.id not in {row.id for row in found}:
                self._files.lost(file.id)
        await self._take_files(found)

    async def _take_files(self, found: list[sa.Row[tuple[object, ...]]]) -> None:
        new = [row for row in found if self._files.here(row.id) is None]
        lying = await asyncio.to_thread(self._blobs.lying) if new else {}
        for row in new:
            try:
                self._files.take(file_of_row(row, lambda d: self._blobs.find(d, lying)))
            except (KeyError, FileNotFoundError):
                log.warning("%s has lost its bytes", row.id)

    async def sweep(self) -> None:
        """Remove what has expired, whoever kept it, and files that are named nowhere."""
        if time.monotonic() < self._swept + SWEEP_S:
            return
        self._swept = time.monotonic()
        try:
            await self._database.write(rows.remove_expired(time.time()))
            await asyncio.to_thread(self._sweep_files)
        except (StorageUnavailableError, sa.exc.SQLAlchemyError, OSError) as error:
            log.warning("not all was swept up: %s", reason(error))

    def _sweep_files(self) -> None:
        self._blobs.touch()
        old = self._blobs.untouched(ORPHAN_S)
        named = self._named() if old else set()
        for path, digest in old:
            if digest not in named:
                _remove(path)

    def _named(self) -> set[bytes]:
        tables = (rows.TURNS, rows.FILES)
        found = (row for table in tables for row in self._database.read(sa.select(table)))
        return {digest for row in found for digest in rows.digests(row)}


def _same(turn: Turn, row: sa.Row[tuple[object, ...]]) -> bool:
    """What is in memory is what lies in the database."""
    ended = turn.response is not None and turn.response["status"] != "failed"
    return row.session == session_text(turn) and (ended or not turn.foreign or row.answer is None)


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # another server was faster
        if path.stat().st_mtime + ORPHAN_S < time.time():  # nobody has touched it meanwhile
            path.unlink()

"""What outlives the process: turns and files as rows, written by one thread in commits of many.

Owns the database's connection, schema version, lock, and the thread that alone writes. A `Change`
is done once its `write` was awaited: committed and synced. Knows nothing of what rows mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from filelock import FileLock, Timeout

from mmserve.errors import first_line
from mmserve.faults import NO_FAULTS, Faults
from mmserve.server.errors import StorageUnavailableError

log = logging.getLogger("mmserve.server")

Change = Callable[[sa.Connection], object]
MIGRATIONS = Path(__file__).parent / "migrations"
BATCH = 256  # changes in one commit
LOCK_NUMBER = 0x6D6D7372  # of PostgreSQL's advisory lock around migrations
READS = "mmserve_reads"  # an option of a connection that takes no lock


class CannotStoreError(OSError):
    """The data folder or the database cannot be used, said in one sentence."""


class _Alone:
    """A folder's lock that one process has."""

    def __init__(self, path: Path) -> None:
        self._lock = FileLock(path, thread_local=False)

    def acquire(self) -> None:
        self._lock.acquire(timeout=0)

    def release(self) -> None:
        self._lock.release()


class _Among:
    """The same lock, had by any number of processes but by none that is alone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def acquire(self) -> None:
        import fcntl  # where there is none, there is no Ray that starts several either

        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Journal(Protocol):
    """Where changes go, and what must wait for all before it (`after`)."""

    def write(self, change: Change) -> Awaitable[None]: ...
    def after(self, action: Callable[[], object]) -> None: ...
    def close(self) -> None: ...


class _Done:
    def __await__(self) -> Generator[None, None, None]:
        return
        yield


class _Commit:
    def __init__(self, future: asyncio.Future[None]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.shield(self._future).__await__()


class NoJournal:
    """Keeps nothing: every change is done at once."""

    def write(self, change: Change) -> Awaitable[None]:
        return _Done()

    def after(self, action: Callable[[], object]) -> None:
        action()

    def close(self) -> None: ...


@dataclass
class _Order:
    change: Change
    future: asyncio.Future[None]
    failure: Exception | None = None


def reason(error: Exception) -> str:
    """Why a database refused, without its statements."""
    return first_line(getattr(error, "orig", None) or error)


class Database:
    """A journal in SQLite (below `folder`) or wherever SQLAlchemy's `url` leads.

    Open from construction, which brings the schema up to date; raises `CannotStoreError`. The
    folder is one server's, or `shared` by several.
    """

    def __init__(
        self,
        folder: Path,
        url: str | None = None,
        faults: Faults = NO_FAULTS,
        *,
        shared: bool = False,
    ) -> None:
        self._faults = faults
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = _Among(folder / "lock") if shared else _Alone(folder / "lock")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock.acquire()
        except (Timeout, BlockingIOError):
            raise CannotStoreError(f"another server uses the data folder {folder}") from None
        except OSError as error:
            raise CannotStoreError(f"cannot write to {folder}: {error.strerror}") from error
        try:
            self._engine = _engine(url or f"sqlite:///{folder / 'mmserve.db'}")
            migrate(self._engine)
        except Exception as error:
            self._lock.release()
            raise CannotStoreError(f"cannot open the database: {reason(error)}") from error

    def read(self, query: sa.Select[Any]) -> list[sa.Row[Any]]:
        """All rows as they are now, on any thread; writers are not kept waiting."""
        with self._engine.connect().execution_options(**{READS: True}) as connection:
            return list(connection.execute(query))

    def write_now(self, change: Change) -> None:
        """Before the first `write` only."""
        with self._engine.begin() as connection:
            change(connection)

    def write(self, change: Change) -> Awaitable[None]:
        """Queue a change; the awaitable raises `StorageUnavailableError` where it failed.

        Called on one event loop. Changes are done in the order of their calls.
        """
        return _Commit(self._order(change))

    def after(self, action: Callable[[], object]) -> None:
        """Call `action` on the loop once all that was written before is done."""
        self._order(lambda connection: None).add_done_callback(lambda future: action())

    def _order(self, change: Change) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        if self._thread is None:
            self._loop = loop
            self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
            self._thread.start()
        future: asyncio.Future[None] = loop.create_future()
        future.add_done_callback(_look)
        self._orders.put(_Order(change, future))
        return future

    def close(self) -> None:
        """Finish what is queued and let the database go."""
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join()
        self._engine.dispose()
        self._lock.release()

    def _run(self) -> None:
        assert self._loop is not None
        going = True
        while going:
            orders, going = self._next()
            try:
                self._commit(orders)
            except Exception:
                for order in orders:  # one of them may be at fault
                    self._alone(order)
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._loop.call_soon_threadsafe(_settle, orders)

    def _next(self) -> tuple[list[_Order], bool]:
        """At least one order, and whether more may come."""
        orders: list[_Order] = []
        while len(orders) < BATCH and (not orders or not self._orders.empty()):
            order = self._orders.get()
            if order is None:
                return orders, False
            orders.append(order)
        return orders, True

    def _commit(self, orders: list[_Order]) -> None:
        if orders:
            self._faults.at("journal.commit")
            with self._engine.begin() as connection:
                for order in orders:
                    order.change(connection)

    def _alone(self, order: _Order) -> None:
        try:
            self._commit([order])
        except Exception as error:
            log.error("nothing was stored: %s", reason(error))
            order.failure = StorageUnavailableError(f"It cannot be stored: {reason(error)}.")


def _look(future: asyncio.Future[None]) -> None:
    """Not every change is waited for; its failure is logged where it happens."""
    if not future.cancelled():
        future.exception()


def _settle(orders: list[_Order]) -> None:
    for order in orders:
        if order.future.done():
            continue
        if order.failure is None:
            order.future.set_result(None)
        else:
            order.future.set_exception(order.failure)


def _engine(url: str) -> sa.Engine:
    if not url.startswith("sqlite"):
        return sa.create_engine(url, pool_pre_ping=True)
    engine = sa.create_engine(url)

    # As SQLAlchemy's manual has it, so that transactions begin where we say, schema changes too.
    @sa.event.listens_for(engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        connection.isolation_level = None
        for pragma in ("busy_timeout=10000", "journal_mode=WAL", "synchronous=FULL"):
            connection.execute(f"PRAGMA {pragma}").close()

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        reads = connection.get_execution_options().get(READS)
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


def migrate(engine: sa.Engine, version: str = "head") -> None:
    """Bring the schema to a version, in one transaction that nobody else can enter meanwhile."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(sa.text(f"SELECT pg_advisory_xact_lock({LOCK_NUMBER})"))
        config.attributes["connection"] = connection
        command.upgrade(config, version)

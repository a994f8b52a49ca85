"""The database: its versions, its commits and why it cannot be opened."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from mmserve.server import rows
from mmserve.server.errors import StorageUnavailableError
from mmserve.server.journal import CannotStoreError, Database, NoJournal, _engine, migrate

ROW = {"owner": "me", "expires_at": 1.5, "body": "{}"}


def insert(id: str) -> Any:
    return rows.insert(rows.FILES, id=id, **ROW)


def ids(database: Database) -> list[str]:
    return [row.id for row in database.read(sa.select(rows.FILES).order_by(rows.FILES.c.number))]


def schema(engine: sa.Engine) -> dict[str, Any]:
    inspector = sa.inspect(engine)
    return {
        name: [
            {column["name"] for column in inspector.get_columns(name)},
            {index["name"] for index in inspector.get_indexes(name)},
        ]
        for name in inspector.get_table_names()
    }


def test_a_database_of_version_1_becomes_what_an_empty_one_becomes(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    engine = _engine(f"sqlite:///{old / 'mmserve.db'}")
    migrate(engine, "0001")
    with engine.begin() as connection:
        insert("file_1")(connection)
    before = schema(engine)
    engine.dispose()
    database, empty = Database(old), Database(new)
    assert ids(database) == ["file_1"] and ids(empty) == []
    assert schema(database._engine) == schema(empty._engine) != before
    database.close()
    empty.close()


def test_the_tables_are_the_ones_that_the_code_knows(tmp_path: Path) -> None:
    database = Database(tmp_path)
    for table in (rows.TURNS, rows.FILES):
        made = {c["name"] for c in sa.inspect(database._engine).get_columns(table.name)}
        assert made == set(table.c.keys())
    database.close()


def test_a_step_that_breaks_off_leaves_the_version_before(tmp_path: Path) -> None:
    engine = _engine(f"sqlite:///{tmp_path / 'x.db'}")
    migrate(engine, "0001")
    before = schema(engine)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE other (x INTEGER)"))
        connection.execute(sa.text("CREATE INDEX turns_hidden ON other (x)"))  # in the way
    with pytest.raises(sa.exc.OperationalError):
        migrate(engine)
    assert schema(engine)["turns"] == before["turns"]
    engine.dispose()


def test_writes_last_in_their_order_and_many_share_a_commit(tmp_path: Path) -> None:
    database = Database(tmp_path)
    sizes: list[int] = []
    commit = database._commit

    def counted(orders: list[Any]) -> None:
        sizes.append(len(orders))
        commit(orders)

    database._commit = counted  # type: ignore[method-assign]

    async def write() -> None:
        await asyncio.gather(*(database.write(insert(f"file_{i}")) for i in range(100)))

    asyncio.run(write())
    database.close()
    assert len([size for size in sizes if size]) < 100
    again = Database(tmp_path)
    assert ids(again) == [f"file_{i}" for i in range(100)]
    again.close()


def test_a_change_at_fault_fails_alone(tmp_path: Path) -> None:
    database = Database(tmp_path)

    async def write() -> list[Any]:
        changes = [insert("file_1"), insert("file_1"), insert("file_2")]
        writes = [_result(database.write(change)) for change in changes]
        return await asyncio.gather(*writes, return_exceptions=True)

    async def _result(commit: Any) -> None:
        await commit

    first, second, third = asyncio.run(write())
    assert first is None and third is None and isinstance(second, StorageUnavailableError)
    database.close()
    again = Database(tmp_path)
    assert ids(again) == ["file_1", "file_2"]
    again.close()


def test_what_comes_after_waits_for_all_before(tmp_path: Path) -> None:
    database = Database(tmp_path)
    seen: list[list[str]] = []

    async def write() -> None:
        database.write(insert("file_1"))
        done = asyncio.Event()
        database.after(lambda: seen.append(ids(database)))
        database.after(done.set)
        assert seen == []
        await done.wait()

    asyncio.run(write())
    database.close()
    assert seen == [["file_1"]]


def test_without_a_journal_all_is_done_at_once() -> None:
    seen: list[int] = []
    NoJournal().after(lambda: seen.append(1))
    assert seen == [1]

    async def write() -> None:
        await NoJournal().write(insert("file_1"))

    asyncio.run(write())


def test_why_it_cannot_be_opened_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CannotStoreError, match=r"^cannot write to .*file"):
        Database(tmp_path / "file" / "data")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "mmserve.db").write_bytes(b"no database at all" * 1000)
    with pytest.raises(CannotStoreError, match="^cannot open the database: .*not a database$"):
        Database(broken)
    (broken / "mmserve.db").unlink()
    Database(broken).close()  # the lock was let go

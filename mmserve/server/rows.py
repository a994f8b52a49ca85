"""Turns, items and files as rows: the tables, the JSON in them, and the changes made to them.

Owns what a row looks like. Bodies are JSON in ASCII, which every database takes; images are named
by their SHA-256 and lie in the blob store. A removed turn that others continue stays, hidden.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import sqlalchemy as sa

from mmserve.prompt import TextPart
from mmserve.server.blobs import Blob
from mmserve.server.history import Entry, History, Item, StoredImage
from mmserve.server.journal import Change

FindBlob = Callable[[bytes], Blob]  # raises KeyError
TOKEN_CHARACTERS = 4  # of English text
NAMED = re.compile(r'"(?:image|sha256)": ?"([0-9a-f]{64})"')

_tables = sa.MetaData()
TURNS = sa.Table(
    "turns",
    _tables,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(64)),
    sa.Column("owner", sa.String(128)),
    sa.Column("parent_id", sa.String(64)),
    sa.Column("hidden", sa.Boolean),
    sa.Column("expires_at", sa.Float(53)),  # seconds since 1970
    sa.Column("question", sa.Text),
    sa.Column("answer", sa.Text),  # once ended
    sa.Column("session", sa.Text),
)
FILES = sa.Table(
    "files",
    _tables,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(64)),
    sa.Column("owner", sa.String(128)),
    sa.Column("expires_at", sa.Float(53)),
    sa.Column("body", sa.Text),
)


def to_text(body: dict[str, Any]) -> str:
    return json.dumps(body, separators=(",", ":"))


def _image_json(image: StoredImage) -> dict[str, Any]:
    return {
        "image": image.digest,
        "param": image.param,
        "detail": image.detail,
        "file_id": image.file_id,
        "number": image.number,
        "item_id": image.item_id,
    }


def _image(body: dict[str, Any], find: FindBlob) -> StoredImage:
    blob = find(bytes.fromhex(body["image"]))
    number, item_id = body.get("number"), body.get("item_id")  # not written before version 3
    return StoredImage(blob, body["param"], body["detail"], body["file_id"], number, item_id)


def _part_json(part: TextPart | StoredImage) -> dict[str, Any]:
    return {"text": part.text} if isinstance(part, TextPart) else _image_json(part)


def _part(body: dict[str, Any], find: FindBlob) -> TextPart | StoredImage:
    return TextPart(body["text"]) if "text" in body else _image(body, find)


def _item_json(item: Item) -> dict[str, Any]:
    return {
        "id": item.id,
        "role": item.role,
        "parts": [_part_json(part) for part in item.parts],
        "token_ids": item.token_ids,
        "call": item.call,
        "tokens": item.tokens,
    }


def _item(body: dict[str, Any], find: FindBlob) -> Item:
    tokens = body["token_ids"]
    count = body.get("tokens")
    if count is None:  # not counted before version 3
        count = sum(len(part.get("text", "")) for part in body["parts"]) // TOKEN_CHARACTERS
    return Item(
        body["id"],
        body["role"],
        tuple(_part(part, find) for part in body["parts"]),
        None if tokens is None else tuple(tokens),
        body["call"],
        count,
    )


def items_json(items: Iterable[Item]) -> list[dict[str, Any]]:
    return [_item_json(item) for item in items]


def items(bodies: list[dict[str, Any]], find: FindBlob) -> tuple[Item, ...]:
    """Raises KeyError where an image is lost."""
    return tuple(_item(body, find) for body in bodies)


def entries_json(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    return [{**_item_json(entry.item), "open": entry.open} for entry in entries]


def entries(bodies: list[dict[str, Any]], find: FindBlob) -> tuple[Entry, ...]:
    return tuple(Entry(_item(body, find), body["open"]) for body in bodies)


def history_json(history: History) -> dict[str, Any]:
    return {
        "carried": entries_json(history.entries),
        "images": [_image_json(image) for image in history.images],
    }


def history(body: dict[str, Any], find: FindBlob) -> History:
    """Without its state. Raises KeyError where an image is lost."""
    images = body.get("images", [])  # none were kept before version 3
    return History(entries(body["carried"], find), tuple(_image(image, find) for image in images))


# Changes


def insert(table: sa.Table, **values: Any) -> Change:
    return lambda connection: connection.execute(table.insert().values(values))


def remove_file(id: str) -> Change:
    return lambda connection: connection.execute(FILES.delete().where(FILES.c.id == id))


def change_turn(id: str, **values: Any) -> Change:
    change = TURNS.update().where(TURNS.c.id == id).values(values)
    return lambda connection: connection.execute(change)


def remove_turn(id: str) -> Change:
    return _remove_turns(TURNS.c.id == id)


def remove_expired(now: float) -> Change:
    """Turns and files, whoever kept them."""
    turns = _remove_turns(TURNS.c.expires_at <= now)

    def change(connection: sa.Connection) -> None:
        turns(connection)
        connection.execute(FILES.delete().where(FILES.c.expires_at <= now))

    return change


def _remove_turns(which: sa.ColumnElement[bool]) -> Change:
    """Hide them, then drop every hidden turn that none continues."""
    child = TURNS.alias()
    needed = sa.exists().where(child.c.parent_id == TURNS.c.id)

    def change(connection: sa.Connection) -> None:
        connection.execute(TURNS.update().where(which).values(hidden=True))
        while connection.execute(TURNS.delete().where(TURNS.c.hidden, ~needed)).rowcount:
            pass

    return change


# Questions


def turn(id: str) -> sa.Select[Any]:
    return sa.select(TURNS).where(TURNS.c.id == id)


def lineage(id: str) -> sa.Select[Any]:
    """A turn and all before it, hidden ones too, the first one first."""
    line = sa.select(TURNS).where(TURNS.c.id == id).cte("line", recursive=True)
    before = sa.select(TURNS).where(TURNS.c.id == line.c.parent_id)
    line = line.union_all(before)
    return sa.select(line).order_by(line.c.number)


def file(id: str) -> sa.Select[Any]:
    return sa.select(FILES).where(FILES.c.id == id)


def files_of(owner: str) -> sa.Select[Any]:
    return sa.select(FILES).where(FILES.c.owner == owner).order_by(FILES.c.number)


def digests(row: sa.Row[Any]) -> Iterable[bytes]:
    """Of the pictures and uploads that a turn or a file names."""
    texts = (text for text in row if isinstance(text, str))
    return (bytes.fromhex(found) for text in texts for found in NAMED.findall(text))

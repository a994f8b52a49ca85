"""Turns as rows and back.

Owns what a row says of a turn. Knows nothing of which turns there are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from mmserve.server import rows
from mmserve.server.history import Item, number
from mmserve.server.turn import Turn
from mmserve.session import SessionState

INTERRUPTED = "The server stopped while it wrote this response."


def turn_row(turn: Turn) -> dict[str, Any]:
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
        "session": session_text(turn),
    }


def session_text(turn: Turn) -> str:
    body: dict[str, Any] = {"state": turn.session.to_json(), "kept": None}
    if turn.kept is not None:
        body["kept"] = {**rows.history_json(turn.kept), "state": turn.kept.state.to_json()}
    return rows.to_text(body)


def answer_text(outputs: Iterable[Item], spoken: Iterable[Item], response: dict[str, Any]) -> str:
    return rows.to_text(
        {
            "outputs": rows.items_json(outputs),
            "spoken": rows.items_json(spoken),
            "response": response,
        }
    )


def turn_of_row(row: sa.Row[Any], known: dict[str, Turn], find: rows.FindBlob) -> Turn:
    question = json.loads(row.question)
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

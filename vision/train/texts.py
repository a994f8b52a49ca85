"""Chats without pictures, written by the base model itself: what must not change.

Owns how they are written, held out and packed. What the base makes of them is asked once, for every
update. Knows nothing of pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mmserve.engine.engine import Engine
from mmserve.train_drafter.writing import Chat, Writer
from mmserve.vision.train.packing import NOTHING

LONGEST = 192  # tokens of an answer
HELD_OUT = 20  # one chat of so many is only measured


class TextRows(NamedTuple):
    """Rows [R, T] of chats side by side. `tokens` int32, `dialogue` int16: which of the row's, -1
    where none is; `positions` int32: in it; `states` [R, T, hidden]: the base model's."""

    tokens: Tensor
    dialogue: Tensor
    positions: Tensor
    states: Tensor

    def take(self, rows: Sequence[int]) -> TextRows:
        index = torch.tensor(rows, device=self.tokens.device)
        return TextRows(*(part[index] for part in self))


def write_texts(engine: Engine, seed: int, tokens: int, deadline: float, file: Path) -> int:
    """Chats until so many tokens of answers or the deadline, each a line; how many tokens."""
    written = 0
    writer = Writer(engine, seed, LONGEST, images=False)
    with file.open("w", encoding="utf-8") as out:
        for chat in writer.write(tokens, deadline):
            out.write(chat.as_json() + "\n")
            written += len(chat.answer)
    return written


def pack_texts(chats: Sequence[Chat], length: int) -> TextRows:
    """Whole chats into rows of `length`, on the CPU, without states; of a longer one its beginning.

    Raises ValueError for none.
    """
    rows: list[list[list[int]]] = []
    used = length
    for chat in chats:
        ids = [
            t for piece in (*chat.pieces, chat.answer) if not isinstance(piece, int) for t in piece
        ]
        ids = ids[:length]
        if used + len(ids) > length:
            rows.append([])
            used = 0
        rows[-1].append(ids)
        used += len(ids)
    if not rows:
        raise ValueError("the base model has written no chat to keep it by")
    made = TextRows(
        torch.zeros(len(rows), length, dtype=torch.int32),
        torch.full((len(rows), length), NOTHING, dtype=torch.int16),
        torch.zeros(len(rows), length, dtype=torch.int32),
        torch.zeros(len(rows), length, 0),
    )
    for r, row in enumerate(rows):
        start = 0
        for number, ids in enumerate(row):
            there = slice(start, start + len(ids))
            made.tokens[r, there] = torch.tensor(ids, dtype=torch.int32)
            made.dialogue[r, there] = number
            made.positions[r, there] = torch.arange(len(ids), dtype=torch.int32)
            start += len(ids)
    return made


def parted(chats: Sequence[Chat]) -> tuple[list[Chat], list[Chat]]:
    """What is learned from, and what is only measured; both have some where there are two."""
    held = [chat for i, chat in enumerate(chats) if i % HELD_OUT == 1]
    return [chat for i, chat in enumerate(chats) if i % HELD_OUT != 1], held

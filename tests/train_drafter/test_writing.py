"""Chats that a tiny model writes, as they are trained on."""

from __future__ import annotations

import math
from pathlib import Path

from mmserve.engine.engine import Engine
from mmserve.train_drafter import writing
from mmserve.train_drafter.pictures import picture
from mmserve.train_drafter.writing import Chat, Writer
from tests.engine.tiny import END, build_tiny, tiny_config


def engine() -> Engine:
    return build_tiny(tiny_config(text_pages=400, max_num_seqs=6))


def write(engine: Engine, tokens: int, *, seed: int = 1, images: bool = True) -> list[Chat]:
    return list(Writer(engine, seed, 24, images).write(tokens, math.inf))


def test_chats_are_text_and_pictures_with_answers_of_the_model() -> None:
    tiny = engine()
    chats = write(tiny, 800)
    assert sum(len(chat.answer) for chat in chats) >= 800
    assert {chat.kind for chat in chats} == {"text", "image"}
    for chat in chats:
        pictures = [piece for piece in chat.pieces if isinstance(piece, int)]
        assert len(pictures) == (chat.kind == "image")
        assert 0 < len(chat.answer) <= 24
        assert END not in chat.answer[:-1]
    assert not tiny.has_work


def test_equal_seeds_write_equal_chats_and_others_others() -> None:
    once = write(engine(), 200)
    assert write(engine(), 200) == once
    assert write(engine(), 200, seed=2) != once


def test_a_model_that_sees_nothing_is_shown_nothing() -> None:
    assert {chat.kind for chat in write(engine(), 200, images=False)} == {"text"}


def test_a_deadline_ends_the_writing() -> None:
    tiny = engine()
    assert list(Writer(tiny, 1, 24, True).write(10**9, 0.0)) == []
    assert not tiny.has_work


def test_chats_are_kept_and_read_again(tmp_path: Path) -> None:
    chats = write(engine(), 100)
    writing.save(chats, tmp_path / "new" / "chats.jsonl")
    file = tmp_path / "new" / "chats.jsonl"
    assert writing.read(file) == chats
    file.write_text(file.read_text()[:-3])
    assert writing.read(file) == chats[:-1]


def test_a_picture_is_a_function_of_its_number() -> None:
    assert picture(3) == picture(3)
    assert len({picture(number) for number in range(20)}) == 20

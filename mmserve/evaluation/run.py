"""Asks every row's questions, some at once, and counts the right answers.

Owns the order and the seed of the held-out examples. Knows nothing of flags or files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from tqdm import tqdm

from mmserve.evaluation.client import Api, messages
from mmserve.evaluation.report import Result
from mmserve.evaluation.rows import Row
from mmserve.evaluation.score import right
from mmserve.vision.train.assets import Assets, Split
from mmserve.vision.train.example import Turn
from mmserve.vision.train.skills import example

SEED = 500
AT_ONCE = 16  # requests; the server puts them into one batch
KEPT_WRONG = 8  # of a skill, to be looked at


class Said(NamedTuple):
    turn: Turn
    text: str
    right: bool


def ask(api: Api, row: Row, index: int, assets: Assets) -> Said:
    made = example(row.skill, Split.HELD_OUT, seed=SEED, index=index, assets=assets)
    if row.longer:
        made = made.enlarged(row.longer)
    text = api.ask(messages(made, row.detail))
    return Said(made.turns[-1], text, right(row.skill, made.turns[-1], text))


def run(api: Api, rows: Sequence[Row], n: int, assets: Assets) -> Iterator[Result]:
    """The rows in their order, each as soon as its last answer is there."""
    with ThreadPoolExecutor(AT_ONCE) as pool, tqdm(total=n * len(rows), file=sys.stderr) as bar:
        for row in rows:
            bar.set_description(row.name)
            said = []
            for one in pool.map(lambda i, row=row: ask(api, row, i, assets), range(n)):
                said.append(one)
                bar.update()
            yield counted(row, said)


def counted(row: Row, said: Sequence[Said]) -> Result:
    wrong = [(s.turn.question, s.turn.answer, s.text) for s in said if not s.right]
    return Result(row, len(said), len(said) - len(wrong), tuple(wrong[:KEPT_WRONG]))

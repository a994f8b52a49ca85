"""How far a training has come: held-out examples of each skill, and text, in one quick look.

Owns what counts as right: that each token of the last answer is the likeliest behind the true ones
before it, which is when greedy decoding says that answer word for word. What is served is measured
through its API instead.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from mmserve.vision.train.dialogue import Dialogue
from mmserve.vision.train.example import Split
from mmserve.vision.train.learner import Learner
from mmserve.vision.train.skills import example
from mmserve.vision.train.stream import Drawing
from mmserve.vision.train.texts import TextRows


def probe(
    learner: Learner, drawing: Drawing, text: TextRows | None, count: int, deadline: float
) -> dict[str, float]:
    """The share of right answers of each skill, by name, of `count` or as many as there is time
    for; with all latents. `divergence`: from the base model on text, a token."""
    measured = {} if text is None else {"divergence": learner.divergence(text)}
    weights = drawing.weights(1.0)
    for skill in sorted(skill for skill, weight in weights.items() if weight):
        if time.monotonic() > deadline:
            break
        measured[skill] = _share(learner, drawing, skill, count)
    return measured


def _share(learner: Learner, drawing: Drawing, skill: str, count: int) -> float:
    right = total = 0
    dialogues = _held_out(drawing, skill, count)
    while total < count:
        shard, skills = drawing.packer.pack(dialogues)
        shown = sum(map(len, skills))
        if not shown:
            break
        total += shown
        right += int(learner.whole_answers(shard).sum())
    return round(right / max(total, 1), 4)


def _held_out(drawing: Drawing, skill: str, count: int) -> Iterator[Dialogue]:
    for index in range(count):
        made = example(
            skill, Split.HELD_OUT, seed=drawing.stage.seed, index=index, assets=drawing.assets
        )
        yield drawing.dialogue(made, drawing.latents, random.Random(index), scored=True)

"""The drafter that a configuration names, and its control.

Owns the choice, and how far each kind looks ahead. Knows nothing of steps or sequences.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from mmserve.config import GIB, EngineConfig, SpecConfig
from mmserve.engine.draft_model import load_draft_model
from mmserve.engine.heads import has_head, load_head
from mmserve.engine.model_runner import ModelRunner
from mmserve.model.weights import Loaded
from mmserve.spec.chained import ChainedDrafter
from mmserve.spec.control import Control
from mmserve.spec.draft_model import ModelDrafter
from mmserve.spec.drafter import Drafter
from mmserve.spec.eagle_drafter import EagleDrafter
from mmserve.spec.lookahead import LookaheadDrafter
from mmserve.spec.ngram import NgramDrafter
from mmserve.spec.suffix import SuffixDrafter

DRAFT_KV_BYTES = GIB // 2
REPEATED, GUESSED = 16, 5  # tokens ahead: of what was said before, of what a model thinks
SURE = 0.6  # of what was said before, where a head would guess instead: it is right about as often
# Tokens of a head's draft: on a GPU rows cost next to nothing, on a CPU eight are computed as one.
TREE, TREE_HERE = 24, 7


class Built(NamedTuple):
    """`length`: how far ahead it is asked for, at most; `trees`: whether drafts may branch."""

    drafter: Drafter
    length: int
    control: Control | None
    trees: bool


def build_drafter(config: EngineConfig, runner: ModelRunner, loaded: Loaded) -> Built | None:
    """None: no speculation. Raises `HeadError` for what cannot draft for this model, ValueError for
    what cannot beside its KV's format, and what loading a model raises."""
    spec = config.speculative
    if spec.method == "lookahead" and runner.num_open:
        raise ValueError(
            "lookahead drafts trees, whose tokens move once they are checked; KV of text in "
            f"{config.cache.text_format} takes chains only, as of ngram, suffix or a head"
        )
    if spec.method is None or (spec.method == "auto" and not has_head("eagle", loaded.name)):
        return None
    drafter, length = _drafter(spec, config, runner, loaded)
    whole = isinstance(drafter, LookaheadDrafter)  # a part of its draft is worth nothing
    if not whole:
        length = spec.num_speculative_tokens or length
    heads = spec.method in ("auto", "medusa", "eagle")
    trees = whole or (heads and _tree_tokens(spec, runner) > 0)
    control = Control(length, length if whole else 1) if spec.adaptive else None
    return Built(drafter, length, control, trees)


def _drafter(
    spec: SpecConfig, config: EngineConfig, runner: ModelRunner, loaded: Loaded
) -> tuple[Drafter, int]:
    """And how far it looks ahead by itself."""
    if spec.method == "ngram":
        return NgramDrafter(spec.prompt_lookup_min, spec.prompt_lookup_max), REPEATED
    if spec.method == "lookahead":
        lookahead = LookaheadDrafter()
        return lookahead, lookahead.length
    if spec.method == "draft_model":
        assert spec.model is not None, "checked where it was read"
        own = dataclasses.replace(config.model, model=spec.model, served_name=None)
        model = load_draft_model(own, loaded, DRAFT_KV_BYTES, config.scheduler)
        return ModelDrafter(model), GUESSED
    if spec.method == "suffix":
        return SuffixDrafter(spec.answers_bytes), REPEATED
    most = _tree_tokens(spec, runner)
    method = "medusa" if spec.method == "medusa" else "eagle"
    head = load_head(method, spec.model, runner, loaded.name, most)
    if isinstance(head, EagleDrafter):
        head.rehearse(spec.num_speculative_tokens or GUESSED)
    if spec.method == "auto":
        answers = SuffixDrafter(spec.answers_bytes, sure=SURE)
        ahead = runner.grown is not None and method == "eagle"
        return ChainedDrafter([answers, head], [REPEATED, GUESSED], ahead=ahead), REPEATED
    return head, GUESSED


def _tree_tokens(spec: SpecConfig, runner: ModelRunner) -> int:
    """0: a chain, whose rows cost the least, and whose bits are those of plain steps. Always where
    pages of text are stored as a whole: of a tree's tokens those that are right would have to move
    first."""
    if runner.num_open:
        return 0
    if spec.tree_tokens is not None:
        return spec.tree_tokens
    if runner.device.type != "cuda":
        return TREE_HERE
    return 0 if runner.deterministic else TREE

"""A second, smaller model that only drafts: its own runner and its own text pages.

Owns its texts and their pages. No prefix is shared and nothing is scheduled: what has no room in
its pool is not drafted for. Knows nothing of the target but its vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers

from mmserve.cache.page_pool import PagePoolExhausted
from mmserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mmserve.engine.build_runner import build_runner
from mmserve.engine.model_runner import ModelRunner
from mmserve.model.weights import Loaded, load
from mmserve.request import Request, SamplingParams, TextSegment
from mmserve.scheduler.batch import Batch, Chunk
from mmserve.sequence import Sequence as Text
from mmserve.spec.draft_model import Extension
from mmserve.spec.head_files import HeadError


class DraftModel:
    """A `TextModel`."""

    def __init__(self, runner: ModelRunner, vocab_size: int, longest: int) -> None:
        """`vocab_size`: tokens that may be guessed, the first ones."""
        self._runner, self._vocab_size, self.longest = runner, vocab_size, longest
        self._page_size = runner.text[0].shape.page_size
        self._texts: dict[str, Text] = {}

    def extend(self, parts: Sequence[Extension]) -> list[int | None]:
        chunks: dict[str, Chunk] = {}
        for name, tokens in parts:
            text = self._texts.get(name)
            start = 0 if text is None else text.num_tokens
            if text is None:
                text = self._begin(name, tokens)
            else:
                for token in tokens:
                    text.append(token)
            if self._make_room(text):
                chunks[name] = Chunk(text, start, len(tokens), samples=True)
            else:
                self.shorten(name, start)
        if not chunks:
            return [None] * len(parts)
        logits = self._runner.run(Batch(list(chunks.values())))
        assert logits is not None
        best = logits.values[:, : self._vocab_size].argmax(-1).tolist()
        found = {chunk.seq.id: token for chunk, token in zip(logits.chunks, best, strict=True)}
        return [found.get(name) for name, _ in parts]

    def shorten(self, name: str, length: int) -> None:
        text = self._texts[name]
        if length == 0:
            return self.forget(name)
        del text.token_ids[length:], text.keys[length:]
        held = -(-length // self._page_size)
        for pool, table in zip(self._runner.text, text.tables, strict=True):
            pool.pages.release(table[held:])
            del table[held:]

    def forget(self, name: str) -> None:
        text = self._texts.pop(name, None)
        if text is not None:
            for pool, table in zip(self._runner.text, text.tables, strict=True):
                pool.pages.release(table)

    def _begin(self, name: str, tokens: Sequence[int]) -> Text:
        request = Request(name, (TextSegment(tuple(tokens)),), SamplingParams())
        text = self._texts[name] = Text(request, regimes=self._runner.regimes)
        text.tables = [[] for _ in self._runner.groups]
        return text

    def _make_room(self, text: Text) -> bool:
        """Whether pages cover all of it now."""
        held = -(-text.num_tokens // self._page_size)
        for pool, table in zip(self._runner.text, text.tables, strict=True):
            try:
                table += pool.pages.allocate(max(held - len(table), 0))
            except PagePoolExhausted:
                return False
        return True


def load_draft_model(
    model: ModelConfig, target: Loaded, text_bytes: int, steps: SchedulerConfig
) -> DraftModel:
    """`text_bytes`: of its KV. Raises `HeadError` where its tokens are not the target's, and as
    `load` does."""
    loaded = load(model, text_bytes)
    check_vocabulary(loaded.tokenizer, target.tokenizer, model.model, target.name)
    config = EngineConfig(
        model, CacheConfig(text_bytes=text_bytes, vision_bytes=text_bytes), scheduler=steps
    )
    runner = build_runner(loaded, config)
    vocab_size = target.tokenizer.get_vocab_size(with_added_tokens=True)
    return DraftModel(runner, vocab_size, loaded.max_model_len)


def check_vocabulary(
    own: tokenizers.Tokenizer, other: tokenizers.Tokenizer, name: str, target: str
) -> None:
    """Raises `HeadError` where a token's number is not the same in both."""
    mine, theirs = (t.get_vocab(with_added_tokens=True) for t in (own, other))
    if mine == theirs:
        return
    token = min(
        (t for t in mine.keys() | theirs.keys() if mine.get(t) != theirs.get(t)),
        key=lambda t: mine.get(t, theirs.get(t, 0)),
    )
    raise HeadError(
        f"{name} cannot draft for {target}: token {token!r} is number {mine.get(token)} of its "
        f"vocabulary and {theirs.get(token)} of the model's"
    )

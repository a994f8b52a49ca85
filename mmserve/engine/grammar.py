"""Constraints to matchers: which tokens an answer may go on with, as one bit a token.

Owns compilation for one tokenizer, its limits and its cache, and `Matcher`, one answer's place in
its grammar. Knows nothing of tensors, requests in flight or JSON surfaces; imports no torch.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from mmserve.engine.grammar_check import Checker
from mmserve.errors import RequestError
from mmserve.request import Constraint
from mmserve.tokenizer import Tokenizer
from mmserve.tools import JSON_STYLE

MAX_BYTES = 64 * 1024  # of a constraint's text, UTF-8
CACHED = 64  # compiled grammars
PARALLEL_FROM = 4  # matchers in one step from which threads pay
MAX_REASON = 300  # characters of the compiler's own words in an error

# What one token may cost: about 7 ms of lexing and 1 ms of parsing, and 100 MB of lexer states in
# all. Beyond it the matcher fails, and with it its answer.
LIMITS = LLParserLimits(
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


class Vocabulary(NamedTuple):
    """What the compiler knows of a tokenizer: each token's bytes as Latin-1, the special tokens,
    and those that end a turn."""

    tokens: Sequence[str]
    special_ids: Sequence[int]
    end_ids: Sequence[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        ids = range(tokenizer.vocab_size)
        return cls(
            [tokenizer.token_bytes(i).decode("latin-1") for i in ids],
            [i for i in ids if tokenizer.is_special(i)],
            sorted(tokenizer.eos_token_ids),
        )

    def load(self, encode: Callable[[str], list[int]] | None = None) -> LLTokenizer:
        return LLTokenizer(_Words(self, encode), eos_token=list(self.end_ids))  # type: ignore[arg-type]


class _Words:
    """The face of a tokenizer that llguidance asks. Texts that can be nothing else become the
    tokens that `encode` gives, where those stand for the very text; else the longest that fit."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]] | None) -> None:
        self.tokens = [token.encode("latin-1") for token in vocabulary.tokens]
        self.special_token_ids = list(vocabulary.special_ids)
        self.eos_token_id = vocabulary.end_ids[0]
        special = frozenset(vocabulary.special_ids)
        self._ids = {t: i for i, t in enumerate(self.tokens) if t and i not in special}
        self._longest = max(map(len, self._ids), default=1)
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        raw = text.encode() if isinstance(text, str) else text
        if self._encode is not None and isinstance(text, str):
            ids = self._encode(text)
            if b"".join(self.tokens[i] for i in ids) == raw:
                return ids
        return list(self._greedy(raw))

    def _greedy(self, raw: bytes) -> Iterator[int]:
        at = 0
        while at < len(raw):
            ends = range(min(at + self._longest, len(raw)), at, -1)
            end = next((end for end in ends if raw[at:end] in self._ids), None)
            if end is None:
                return
            yield self._ids[raw[at:end]]
            at = end


class Matcher:
    """How far one answer has come in its grammar. Belongs to one thread at a time."""

    def __init__(self, inner: LLMatcher, vocab_size: int) -> None:
        self.inner = inner
        self.mask_words = -(-vocab_size // 32)  # of 32 bits

    def copy(self) -> Matcher:
        """Another that is as far."""
        return Matcher(self.inner.deep_copy(), 32 * self.mask_words)

    def accept(self, token_id: int) -> str | None:
        """Go on by a token; why the answer cannot go on, where it cannot."""
        # One that failed while it made a mask takes the end-of-turn token without complaint.
        if self.inner.consume_token(token_id) and not self.inner.is_error():
            return None
        reason = _words(self.inner.get_error().split("\n", 1)[0])
        return f"The answer got stuck in its grammar: {reason}."

    def fork(self, token_id: int) -> Matcher | None:
        """Another one, gone on by a token; None where the grammar does not allow it."""
        fork = self.copy()
        return fork if fork.accept(token_id) is None else None


class Grammars:
    """Compiles for one tokenizer. Thread-safe; a cache hit waits for nobody who compiles."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """The tokenizer is read when the first grammar is wanted."""
        self._tokenizer = tokenizer
        self._loaded: LLTokenizer | None = None
        self._checker: Checker | None = None
        self._known: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        self._reading = threading.Lock()  # of `_known`
        self._compiling = threading.Lock()

    def matcher(self, constraint: Constraint) -> Matcher:
        """At the beginning of a new answer.

        Compiles unless the constraint is known, which may take seconds. Raises `RequestError`,
        naming the constraint's field, where it is too large, is no grammar or takes too long.
        """
        grammar = self._get(constraint)
        if grammar is None:
            with self._compiling:
                grammar = self._get(constraint) or self._compile(constraint)
        assert self._loaded is not None
        return Matcher(grammar.deep_copy(), self._loaded.vocab_size)

    def knows(self, constraint: Constraint) -> bool:
        """Whether `matcher` has it at hand; it counts as used."""
        return self._get(constraint) is not None

    def _get(self, constraint: Constraint) -> LLMatcher | None:
        with self._reading:
            grammar = self._known.get(constraint)
            if grammar is not None:
                self._known.move_to_end(constraint)
            return grammar

    def _compile(self, constraint: Constraint) -> LLMatcher:
        size = len(constraint.text.encode("utf-8", "replace"))
        if size > MAX_BYTES:
            raise _refused(constraint, f"it has {size} bytes; the limit is {MAX_BYTES}")
        try:
            source = _source(constraint)
        except ValueError as error:
            raise _refused(constraint, str(error)) from None
        if self._loaded is None or self._checker is None:
            vocabulary = Vocabulary.of(self._tokenizer)
            self._loaded = vocabulary.load(self._tokenizer.encode)
            self._checker = Checker(json.dumps(vocabulary))
            weakref.finalize(self, self._checker.close)
        reason = self._checker.check(source)
        if reason:
            raise _refused(constraint, reason)
        grammar = compile_grammar(self._loaded, source)
        grammar.compute_bitmask()  # what the first token needs is made once for all answers
        with self._reading:
            self._known[constraint] = grammar
            if len(self._known) > CACHED:
                self._known.popitem(last=False)
        return grammar


def compile_grammar(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """May take minutes and gigabytes for a few hundred bytes: see `grammar_check`."""
    return LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)


_executor: LLExecutor | None = None


def fill_masks(matchers: Sequence[Matcher], address: int, row_bytes: int) -> None:
    """Write what each may go on with to row-major memory, bit i of a row for token i.

    A matcher at its end, or failed, allows the end-of-turn tokens alone.
    """
    global _executor
    if len(matchers) < PARALLEL_FROM:
        for i, matcher in enumerate(matchers):
            matcher.inner.unsafe_compute_mask_ptr(address + i * row_bytes, row_bytes)
        return
    _executor = _executor or LLExecutor()
    rows = [(matcher.inner, i) for i, matcher in enumerate(matchers)]
    _executor.unsafe_compute_mask_ptr(rows, address, row_bytes, len(rows))


def _source(constraint: Constraint) -> str:
    """In the compiler's own form. Raises ValueError where the text is not of its kind."""
    kind, text = constraint.kind, constraint.text
    if kind == "schema":
        options = {**JSON_STYLE, "lenient": constraint.lenient}
        return LLMatcher.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]
    assert kind in ("regex", "choice", "grammar"), kind
    return grammar_from(kind, text)  # type: ignore[arg-type]


def _refused(constraint: Constraint, reason: str) -> RequestError:
    what = {"schema": "JSON schema", "regex": "regular expression", "choice": "list of choices"}
    name = what.get(constraint.kind, "grammar")
    return RequestError(f"This {name} cannot be used: {_words(reason)}.", param=constraint.param)


def _words(error: str) -> str:
    """The compiler's message as a part of one sentence."""
    line = " ".join(error.replace("<non-verbose/>", "").split())
    return line[:MAX_REASON].rstrip(". ")

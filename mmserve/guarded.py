"""Text to token ids for a stock tokenizer, with users' words kept out of its control tokens.

Owns the rule that only a chat template writes control tokens (`<|im_end|>`, `<image>`, `</s>`).
Such a string in a user's text is *quoted* before the template sees it: a sentinel of private
characters stands for it, and comes back as the plain text it was. Knows nothing of images.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Collection, Sequence
from typing import Any

import tokenizers

# Private characters, which no text has a use for; in users' texts they become U+FFFD.
_OPEN, _CLOSE, _ANSWER = "\U0010fff0", "\U0010fff1", "\U0010fff2"
_SENTINEL = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
_RESERVED = str.maketrans(dict.fromkeys((_OPEN, _CLOSE, _ANSWER), "\ufffd"))
_SPACES = ("▁", "Ġ", " ")  # how vocabularies write a token's leading space


class Quotes:
    """What was taken out of one conversation's texts, to be put back after the template."""

    def __init__(
        self, control: re.Pattern[str], loose: re.Pattern[str], apart: bool = False
    ) -> None:
        """`apart`: every text ends with a sentinel, so that no two of them can be read as one."""
        self._patterns = {False: control, True: loose}
        self._apart = apart
        self.taken: list[str | tuple[int, ...]] = []  # a text, or the tokens of an answer

    def text(self, text: str, own: bool = False) -> str:
        """A user's text as the template may see it; `own`: it is the model's own earlier text,
        which keeps its tool-call and reasoning tags."""
        text = self._quoted(text, own)
        return text + self._take("") if self._apart else text

    def _quoted(self, text: str, own: bool = False) -> str:
        text = text.translate(_RESERVED)
        return self._patterns[not own].sub(lambda found: self._take(found[0]), text)

    def tree(self, value: Any) -> Any:
        """All strings in lists and dicts (tool descriptions, arguments), keys too."""
        if isinstance(value, str):
            return self._quoted(value)
        if isinstance(value, dict):
            return {self.tree(k): self.tree(v) for k, v in value.items()}
        return [self.tree(v) for v in value] if isinstance(value, (list, tuple)) else value

    def answer(self, token_ids: Sequence[int]) -> str:
        """What stands for an earlier answer, whose exact tokens take its place."""
        return self._take(tuple(token_ids))

    def _take(self, what: str | tuple[int, ...]) -> str:
        self.taken.append(what)
        return f"{_OPEN}{len(self.taken) - 1}{_CLOSE}"


class GuardedEncoder:
    """A private copy of a fast tokenizer's backend: nothing changes it, so threads may share it."""

    def __init__(
        self, backend: tokenizers.Tokenizer, control: Collection[str], tags: Collection[str] = ()
    ) -> None:
        """`control`: besides the special tokens, what no text may write. `tags`: added tokens that
        the template writes and that the model's own answers may hold (`<think>`)."""
        self._backend = tokenizers.Tokenizer.from_str(backend.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = False
        added = self._backend.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special}
        self._control = special | {c for c in control if self._backend.token_to_id(c) is not None}
        self._tags = set(tags) - self._control
        self._backend.add_special_tokens([tokenizers.AddedToken(_ANSWER, normalized=False)])
        self._answer_id = self._backend.token_to_id(_ANSWER)
        names = self._control | self._tags
        self._heads = {name[:n] for name in names for n in range(1, len(name))}
        self._tails = {name[n:] for name in names for n in range(1, len(name))}
        self._longest = max(map(len, names), default=1) - 1
        self._plain: tokenizers.Tokenizer | None = None
        self._lock = threading.Lock()

    def quotes(self, texts: Collection[str] = ()) -> Quotes:
        """For a conversation of these texts, which a template may join in any order, trimmed."""
        loose = _any_of(self._control | self._tags)
        return Quotes(_any_of(self._control), loose, self._may_make_up_a_token(texts))

    def _may_make_up_a_token(self, texts: Collection[str]) -> bool:
        """Whether one text ends as a control token or tag begins, and another begins as one ends.

        However a token is spread over texts, its first piece is such an end, its last such a
        beginning. What only looks like it costs nothing but a sentinel.
        """
        if len(texts) < 2:
            return False
        sizes = range(1, self._longest + 1)
        shown = {shape for text in texts for shape in (text, text.strip())}
        return any(text[-n:] in self._heads for text in shown for n in sizes) and any(
            text[:n] in self._tails for text in shown for n in sizes
        )

    def encode(self, text: str, quotes: Quotes, *, add_special_tokens: bool) -> list[int]:
        """Ids of a rendered template, as the tokenizer itself gives them; quoted texts as plain
        text, answers as their tokens."""
        found = [quotes.taken[int(i)] for i in _SENTINEL.findall(text)]
        answers = [what for what in found if isinstance(what, tuple)]
        encoder = self._backend
        if any(isinstance(what, str) for what in found):
            # Every control token still in the text is the template's. They are renamed, and so
            # they are in this tokenizer: what users wrote is then text like any other.
            encoder = self._with_renamed_tokens()
            text = _any_of(self._control | self._tags).sub(f"{_OPEN}\\g<0>{_CLOSE}", text)
        if found:
            text = self._put_back(text, quotes)
        ids: list[int] = encoder.encode(text, add_special_tokens=add_special_tokens).ids
        return self._with_answers(ids, answers) if answers else ids

    def _put_back(self, text: str, quotes: Quotes) -> str:
        out: list[str] = []
        end = 0
        for found in _SENTINEL.finditer(text):
            before, what = text[end : found.start()], quotes.taken[int(found[1])]
            if isinstance(what, tuple):
                # Templates set a space before an answer that the model itself began with one.
                token = self._backend.id_to_token(what[0]) if what else None
                if before.endswith(" ") and token is not None and token.startswith(_SPACES):
                    before = before[:-1]
                what = _ANSWER
            out += (before, what)
            end = found.end()
        return "".join(out) + text[end:]

    def _with_answers(self, ids: list[int], answers: list[tuple[int, ...]]) -> list[int]:
        out: list[int] = []
        rest = iter(answers)
        for i, token in enumerate(ids):
            if token != self._answer_id:
                out.append(token)
                continue
            answer = next(rest)
            # An answer that ended its turn brings the end token; the template writes it too.
            ended = bool(answer) and ids[i + 1 : i + 2] == [answer[-1]]
            out += answer[:-1] if ended else answer
        return out

    def _with_renamed_tokens(self) -> tokenizers.Tokenizer:
        """The same tokenizer with each control token and tag under a name nobody can write.

        Made when first needed: a large vocabulary takes a second or two.
        """
        with self._lock:
            if self._plain is None:
                names = self._control | self._tags
                self._plain = _renamed(self._backend, names)
            return self._plain


def _renamed(backend: tokenizers.Tokenizer, names: Collection[str]) -> tokenizers.Tokenizer:
    new = {name: f"{_OPEN}{name}{_CLOSE}" for name in names}
    data = json.loads(backend.to_str())
    for token in data["added_tokens"]:
        token["content"] = new.get(token["content"], token["content"])
    model = data["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {new.get(token, token): id_ for token, id_ in model["vocab"].items()}
    else:
        model["vocab"] = [[new.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token") in new:
        model["unk_token"] = new[model["unk_token"]]
    made = tokenizers.Tokenizer.from_str(json.dumps(data))
    for name in names:
        ids = made.encode(new[name], add_special_tokens=False).ids
        assert ids == [backend.token_to_id(name)], f"token {name!r} cannot be kept apart from text"
    return made


def _any_of(names: Collection[str]) -> re.Pattern[str]:
    """Longest first, so that a token wins over those it contains."""
    longest = sorted(names, key=lambda name: (-len(name), name))
    return re.compile("|".join(map(re.escape, longest)) or "(?!)")

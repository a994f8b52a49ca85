"""A stream of token ids to a stream of text that ends at a stop string.

Owns what is held back: the bytes of a character whose tokens have not all come, and text in which a
stop string may have begun. Knows nothing of requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mmserve.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Emits each character once it is whole; special tokens give no text.

    All that `push` and `flush` returned, joined, equals `Tokenizer.decode` of all the ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete, perhaps none."""
        plain = (t for t in token_ids if not self._tokenizer.is_special(t))
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, plain)))

    def flush(self) -> str:
        """The rest at the end: U+FFFD for a character that never became whole."""
        return self._decoder.decode(b"", final=True)


class StopResult(NamedTuple):
    text: str  # safe to send
    stop: str | None = None  # the stop string that was met; nothing follows


class StopChecker:
    """Cuts a stream at the first stop string to be completed, which itself is never sent.

    When several are completed by the same character, the longest counts. So the result does not
    depend on how the stream was split.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string"
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, text: str) -> StopResult:
        """Takes more text; returns what can be sent, and the stop string if one was met.

        Only the longest end that may begin a stop string is held back.
        """
        text = self._held + text
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if found:
            _, start, stop = min(found)
            self._held = ""
            return StopResult(text[:start], stop)
        keep = self._held_length(text)
        self._held = text[len(text) - keep :]
        return StopResult(text[: len(text) - keep])

    def flush(self) -> str:
        """The held text, when the stream has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _held_length(self, text: str) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0

"""A stream of token ids to a stream of text.

Owns the bytes of a character whose tokens have not all come. Knows nothing of requests or stops.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

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

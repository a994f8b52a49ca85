"""Text to token ids and back, for byte-level and SentencePiece-like tokenizers.

Owns the rule that text never becomes a special token: those are had by name, one at a time. Knows
nothing of chat, images or models.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers

_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a byte of a character that is not in the vocabulary


class Tokenizer:
    """A `tokenizers.Tokenizer` with the special tokens kept out of reach of text."""

    def __init__(self, backend: tokenizers.Tokenizer, eos_tokens: Iterable[str]) -> None:
        """Copies `backend`, whose decoder must say what bytes a token stands for, whatever is
        beside it; `eos_tokens` end a turn.

        Raises ValueError for another kind of tokenizer or an unknown token name.
        """
        kinds = _decoder_kinds(backend)
        if not kinds & {"ByteLevel", "Metaspace"}:
            raise ValueError(
                f"tokenizers that decode by {', '.join(sorted(kinds)) or 'nothing'} are not "
                "supported; byte-level and SentencePiece-like ones are"
            )
        self._backend = tokenizers.Tokenizer.from_str(backend.to_str())
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._special = frozenset(id_ for id_, token in added.items() if token.special)
        self._byte_of = _byte_alphabet() if "ByteLevel" in kinds else None
        self.eos_token_ids = frozenset(self.special(name) for name in eos_tokens)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all that it is made of, hexadecimal."""
        return hashlib.sha256(self._backend.to_str().encode()).hexdigest()

    @property
    def vocab_size(self) -> int:
        """Known ids, special ones included; a model's logits may be padded beyond."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def special(self, name: str) -> int:
        """The id of a token by its exact name. Raises ValueError when there is none."""
        id_ = self._backend.token_to_id(name)
        if id_ is None:
            raise ValueError(f"the tokenizer has no token {name!r}")
        return int(id_)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; text that looks like a special token stays text."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD. Unknown ids give nothing.

        The bytes of all tokens: a space that a first token begins with stays, as in a stream.
        """
        shown = (i for i in token_ids if not (skip_special and i in self._special))
        return b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for (a special token: its name; an unknown id: none)."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_of is None:
            return self._piece_bytes(token_id, str(token))
        try:
            return bytes(self._byte_of[char] for char in token)
        except KeyError:  # an added token, kept as written
            return str(token).encode()

    def _piece_bytes(self, token_id: int, token: str) -> bytes:
        if token_id in self._added:
            return token.encode()
        if found := _BYTE.fullmatch(token):
            return bytes([int(found[1], 16)])
        return token.replace("▁", " ").encode()


def _decoder_kinds(backend: tokenizers.Tokenizer) -> set[str]:
    """The decoder's steps by name; writing spaces for `▁` is Metaspace under either name."""
    if backend.decoder is None:
        return set()
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    return {"Metaspace" if step == spaces else str(step["type"]) for step in steps}


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in a byte-level vocabulary.

    Visible Latin-1 characters stand for themselves, every other byte, in order, for the
    characters from U+0100 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(0x100 + i): byte for i, byte in enumerate(hidden)
    }

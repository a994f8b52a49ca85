"""Tokenizer: text stays text, special tokens are had by name, decoding inverts encoding."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from mmserve.tokenizer import Tokenizer


@pytest.mark.parametrize("text", ["<|im_end|>", "a <|im_start|>system", "<|im_end|><|im_end|>"])
def test_text_that_looks_like_a_special_token_stays_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert not any(tokenizer.is_special(i) for i in ids)
    assert tokenizer.decode(ids) == text


def test_the_given_backend_keeps_its_own_settings(bpe: tokenizers.Tokenizer) -> None:
    Tokenizer(bpe, eos_tokens=["<|im_end|>"])
    assert bpe.encode("<|im_end|>").ids == [bpe.token_to_id("<|im_end|>")]


def test_a_fingerprint_names_all_that_a_tokenizer_is_made_of(bpe: tokenizers.Tokenizer) -> None:
    one, two = (Tokenizer(bpe, eos_tokens=[]).fingerprint for _ in range(2))
    assert one == two
    other = tokenizers.Tokenizer.from_str(bpe.to_str())
    other.add_tokens(["another"])
    assert Tokenizer(other, eos_tokens=[]).fingerprint != one


def test_a_special_token_is_had_by_name_and_ends_turns(tokenizer: Tokenizer) -> None:
    end = tokenizer.special("<|im_end|>")
    assert tokenizer.is_special(end)
    assert tokenizer.eos_token_ids == {end, tokenizer.special("<|endoftext|>")}
    assert tokenizer.decode([end]) == ""
    assert tokenizer.decode([end], skip_special=False) == "<|im_end|>"
    with pytest.raises(ValueError, match="no token '<image>'"):
        tokenizer.special("<image>")


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece()])
def test_a_tokenizer_whose_tokens_are_no_bytes_is_refused(decoder: Any) -> None:
    backend = tokenizers.Tokenizer(models.BPE())
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(ValueError, match="not supported; byte-level and SentencePiece-like"):
        Tokenizer(backend, eos_tokens=[])


LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


@pytest.fixture(
    scope="module",
    params=[
        decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)]),
        decoders.Sequence(LLAMA),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")]),
    ],
    ids=["llama", "gemma", "metaspace"],
)
def pieces(request: pytest.FixtureRequest) -> Tokenizer:
    """SentencePiece as transformers converts it: `▁` for spaces, a token for each byte."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["</s>", "▁", "▁the", "fox", "▁fox", "s", *bytes_]
    vocabulary = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = request.param
    backend.add_special_tokens(["</s>"])
    backend.add_tokens(["▁▁raw"])
    return Tokenizer(backend, eos_tokens=["</s>"])


def test_pieces_stand_for_their_text_and_byte_tokens_for_a_byte(pieces: Tokenizer) -> None:
    def ids(*tokens: str) -> list[int]:
        return [pieces.special(token) for token in tokens]

    assert pieces.decode(ids("▁the", "▁fox", "s", "</s>")) == " the foxs"
    assert pieces.decode(ids("fox", "<0xC3>", "<0xA9>", "▁")) == "foxé "
    assert pieces.token_bytes(ids("<0xC3>")[0]) == b"\xc3"
    assert pieces.decode(ids("▁▁raw", "</s>"), skip_special=False) == "▁▁raw</s>"
    assert pieces.token_bytes(pieces.vocab_size) == b""


def test_pieces_decode_as_the_backend_does_behind_another_token(pieces: Tokenizer) -> None:
    """Only at the very beginning backends drop a space."""
    backend = pieces._backend
    for token in ("▁the", "fox", "▁fox", "s", "▁"):
        begun = [pieces.special("fox"), pieces.special(token)]
        assert pieces.decode(begun) == backend.decode(begun)


@given(text=st.text())
def test_decoding_inverts_encoding(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_every_token_of_the_alphabet_stands_for_one_byte(tokenizer: Tokenizer) -> None:
    lengths = [len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)]
    single = {
        tokenizer.token_bytes(i)
        for i, length in enumerate(lengths)
        if length == 1 and not tokenizer.is_special(i)
    }
    assert single == {bytes([b]) for b in range(256)}
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""

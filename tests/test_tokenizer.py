"""Tokenizer: text stays text, special tokens are had by name, decoding inverts encoding."""

from __future__ import annotations

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


def test_a_special_token_is_had_by_name_and_ends_turns(tokenizer: Tokenizer) -> None:
    end = tokenizer.special("<|im_end|>")
    assert tokenizer.is_special(end)
    assert tokenizer.eos_token_ids == {end, tokenizer.special("<|endoftext|>")}
    assert tokenizer.decode([end]) == ""
    assert tokenizer.decode([end], skip_special=False) == "<|im_end|>"
    with pytest.raises(ValueError, match="no token '<image>'"):
        tokenizer.special("<image>")


def test_a_tokenizer_that_is_not_byte_level_is_refused() -> None:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.decoder = decoders.Metaspace()
    with pytest.raises(ValueError, match="byte-level"):
        Tokenizer(backend, eos_tokens=[])


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

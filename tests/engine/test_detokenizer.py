"""IncrementalDetokenizer: the stream equals decoding at once and never shows half a character."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from mmserve.engine.detokenizer import IncrementalDetokenizer
from mmserve.tokenizer import Tokenizer

TEXT = st.text(st.sampled_from("aé汉字😀👩🏽‍🚀🇩🇪\u00a0 \n�")) | st.text()


@given(text=TEXT, data=st.data())
def test_text_in_any_split_is_streamed_whole(
    tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    ids = tokenizer.encode(text)
    stream = IncrementalDetokenizer(tokenizer)
    sent = ""
    while ids:
        n = data.draw(st.integers(0, len(ids)))
        sent += stream.push(ids[:n])
        assert text.startswith(sent), "half a character was sent"
        if not n:
            sent += stream.push(ids[:1])
        ids = ids[max(n, 1) :]
    assert sent == text
    assert stream.flush() == ""


@given(ids=st.lists(st.integers(0, 500)))
@example(ids=[])
def test_any_ids_streamed_equal_the_ids_decoded_at_once(
    tokenizer: Tokenizer, ids: list[int]
) -> None:
    stream = IncrementalDetokenizer(tokenizer)
    sent = [stream.push([token_id]) for token_id in ids]
    assert "".join(sent) + stream.flush() == tokenizer.decode(ids)


def test_an_emoji_is_sent_with_its_last_byte(tokenizer: Tokenizer) -> None:
    byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    stream = IncrementalDetokenizer(tokenizer)
    sent = [stream.push([byte[bytes([b])]]) for b in "🦊".encode()]
    assert sent == ["", "", "", "🦊"]


def test_an_unfinished_character_comes_out_once_at_the_end(tokenizer: Tokenizer) -> None:
    byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    stream = IncrementalDetokenizer(tokenizer)
    assert stream.push([byte[b"\xf0"], byte[b"\x9f"]]) == ""
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"
    assert stream.flush() == ""

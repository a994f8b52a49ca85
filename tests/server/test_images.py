"""Data URLs: every legal spelling, and a reason for the rest."""

from __future__ import annotations

import base64
from urllib.parse import quote, quote_from_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.config import ImageLimits
from mmserve.errors import ImageTooLargeError, InvalidImageError, RequestError
from mmserve.server.images import data_url, decode_data_url, sniff
from tests.server.conftest import Running

DATA = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) + b"\xfb\xff\xfe?>"
B64 = base64.b64encode(DATA).decode()
LIMITS = ImageLimits(max_bytes=4096)

LEGAL = {
    "plain": f"data:image/png;base64,{B64}",
    "with a parameter": f"data:image/png;charset=utf-8;base64,{B64}",
    "without a subtype": f"data:image;base64,{B64}",
    "without a type": f"data:;base64,{B64}",
    "upper case": f"DATA:IMAGE/PNG;BASE64,{B64}",
    "url-safe alphabet": f"data:image/png;base64,{base64.urlsafe_b64encode(DATA).decode()}",
    "without padding": f"data:image/png;base64,{B64.rstrip('=')}",
    "with line breaks": f"data:image/png;base64,{B64[:40]}\r\n{B64[40:80]}\n {B64[80:]}",
    "percent-encoded base64": f"data:image/png;base64,{quote(B64, safe='')}",
    "percent-encoded bytes": f"data:image/png,{quote_from_bytes(DATA, safe='')}",
    "wrong type": f"data:image/jpeg;base64,{B64}",
}
ILLEGAL = {
    "no comma": f"data:image/png;base64{B64}",
    "no data": "data:image/png;base64,",
    "no base64": "data:image/png;base64,@@@@",
    "cut base64": "data:image/png;base64,A",
    "padding inside": "data:image/png;base64,QQ==QQ==",
    "not ascii": "data:image/png;base64,汉字",
    "half a surrogate pair": "data:image/png,\ud800",
}


@pytest.mark.parametrize("url", LEGAL.values(), ids=LEGAL)
def test_legal_forms_give_the_bytes(url: str) -> None:
    assert decode_data_url(url, LIMITS, "p") == DATA


@pytest.mark.parametrize("url", ILLEGAL.values(), ids=ILLEGAL)
def test_illegal_forms_are_refused_with_a_reason(url: str) -> None:
    with pytest.raises(InvalidImageError) as caught:
        decode_data_url(url, LIMITS, "p")
    assert caught.value.param == "p" and caught.value.message


def test_size_is_refused_before_decoding() -> None:
    for url in (data_url(b"x" * 5000), "data:," + "a" * 20_000, data_url(b"x" * 10**6)):
        with pytest.raises(ImageTooLargeError):
            decode_data_url(url, LIMITS, "p")


@given(st.binary(min_size=1, max_size=200))
def test_encoding_and_decoding_are_inverse(data: bytes) -> None:
    assert decode_data_url(data_url(data), LIMITS, "p") == data


@given(st.text(max_size=60))
def test_any_text_gives_bytes_or_a_named_refusal(text: str) -> None:
    for prefix in ("data:", "data:;base64,"):
        try:
            assert decode_data_url(prefix + text, LIMITS, "p")
        except RequestError as error:
            assert error.param == "p"


def test_formats_are_told_by_their_first_bytes() -> None:
    assert sniff(DATA) == "image/png"
    assert sniff(b"\xff\xd8\xff\xe0") == "image/jpeg"
    assert sniff(b"GIF89a") == "image/gif"
    assert sniff(b"RIFF\0\0\0\0WEBPVP8 ") == "image/webp"
    assert sniff(b"RIFF\0\0\0\0WAVE") is None
    assert sniff(b"<html>") is None and sniff(b"") is None


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("data:text/html;base64," + base64.b64encode(b"<html>").decode(), "unsupported_image_type"),
        ("https://example.org/cat.png", "image_url_not_allowed"),
        ("data:image/png;base64,!", "invalid_image"),
        (data_url(DATA + b"broken"), "invalid_image"),
        (data_url(b"\x89PNG\r\n\x1a\n" + b"\0" * 1_200_000), "image_too_large"),
        ("file_unknown", "file_not_found"),
    ],
    ids=["html", "remote", "base64", "cut", "large", "file"],
)
def test_both_surfaces_refuse_bad_images_before_any_token(
    server: Running, url: str, code: str
) -> None:
    http = server.http()
    chat = {"type": "image_url", "image_url": {"url": url}}
    part = {"type": "input_image", "image_url": url}
    answers = [
        http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": ["x", chat]}]}
        ),
        http.post("/v1/responses", json={"input": [{"role": "user", "content": ["x", part]}]}),
    ]
    for answer, root in zip(answers, ("messages", "input"), strict=True):
        assert answer.status_code == (404 if code == "file_not_found" else 400)
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == (code, f"{root}[0].content[1]")
        assert len(error["message"]) < 300
    assert not server.engine.prompts


def test_too_many_images_are_refused(server: Running) -> None:
    part = {"type": "input_image", "image_url": data_url(DATA)}
    body = {"input": [{"role": "user", "content": [part] * 9}]}
    answer = server.http().post("/v1/responses", json=body)
    assert answer.json()["error"]["code"] == "too_many_images"

"""What must hold of any bytes at all: each function returns, or raises what it found broken.

Owns the statements and the seeds; `run.py` and the suite make the bytes. A refusal by name is a
result.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mmserve.config import ImageLimits
from mmserve.errors import RequestError
from mmserve.server.image_hosts import is_public, parse_address
from mmserve.server.images import data_url, decode_data_url
from mmserve.vision import preprocess
from tests.vision.strangers import strangers

# Small, so that what grows is met at once.
LIMITS = ImageLimits(max_bytes=1 << 16, max_pixels=1 << 16, max_side=1 << 10, max_frames=20)
SIZE = 16


def images(data: bytes) -> None:
    """A file is shown whole, the same each time and either way, or refused by name."""
    try:
        header = preprocess.check_header(data, LIMITS)
        pixels = preprocess.decode(data, LIMITS, SIZE)
    except RequestError as error:
        assert error.status == 400 and error.message
        return
    assert pixels.shape == (3, SIZE, SIZE) and pixels.dtype == np.uint8
    assert np.array_equal(pixels, preprocess.decode(data, LIMITS, SIZE))
    full = preprocess.decode_full(data, LIMITS)
    assert full.mode == "RGB" and full.width * full.height <= LIMITS.max_pixels
    if header.format != "GIF":  # whose frames may be larger than what its header says
        assert sorted(full.size) == sorted((header.width, header.height))


def data_urls(data: bytes) -> None:
    """A data URL gives bytes within the limit or a named refusal, and they survive the way back."""
    text = "data:" + data.decode("utf-8", "surrogateescape")
    try:
        found = decode_data_url(text, LIMITS, "p")
    except RequestError as error:
        assert error.status == 400 and error.param == "p"
        return
    assert 0 < len(found) <= LIMITS.max_bytes
    assert decode_data_url(data_url(found), LIMITS, "p") == found


def addresses(data: bytes) -> None:
    """A URL is read in one way, which written again reads the same, or not at all."""
    text = data.decode("utf-8", "replace")
    assert isinstance(is_public(text), bool)
    try:
        address = parse_address(text)
    except ValueError:
        return
    assert parse_address(address.url) == address
    assert not set(address.host) & set("@/\\?#%[] ") and address.target.isascii()


def image_seeds() -> list[bytes]:
    return [data for _, data, _ in strangers() if len(data) <= LIMITS.max_bytes]


def url_seeds() -> list[bytes]:
    small = [data for data in image_seeds() if len(data) < 300]
    urls = [data_url(data).removeprefix("data:").encode() for data in small]
    return [*urls, b";base64,QQ", b",%41%ff", b"image/png;charset=utf-8;BASE64,QUJD\r\n"]


def address_seeds() -> list[bytes]:
    urls = ("https://example.org/a?b#c", "http://[::1]:80/", "http://127.0.0.1", "https://a.b:8443")
    return [url.encode() for url in urls]


TARGETS: dict[str, tuple[Callable[[bytes], None], Callable[[], list[bytes]]]] = {
    "images": (images, image_seeds),
    "data_urls": (data_urls, url_seeds),
    "addresses": (addresses, address_seeds),
}

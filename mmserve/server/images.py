"""Image references in requests: data URLs and file ids to bytes.

Owns RFC 2397 parsing, lenient where senders differ and strict where bytes would be guessed. Never
fetches anything. Knows nothing of pixels.
"""

from __future__ import annotations

import base64
import binascii
from urllib.parse import unquote, unquote_to_bytes

from mmserve.config import ImageLimits
from mmserve.errors import ImageTooLargeError, InvalidImageError

URL_SAFE = bytes.maketrans(b"-_", b"+/")
SPACE = b" \t\r\n\f"
MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)


def sniff(data: bytes) -> str | None:
    """The media type of an accepted image format by its first bytes, or None."""
    for magic, name in MAGIC:
        if data.startswith(magic):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return None


def is_data_url(url: str) -> bool:
    return url[:5].lower() == "data:"


def is_file_id(url: str) -> bool:
    return url.startswith(("file_", "file-"))


def _too_large(size: int, limits: ImageLimits, param: str) -> ImageTooLargeError:
    return ImageTooLargeError(
        f"The image is {size / 2**20:.1f} MiB; the limit is {limits.max_bytes / 2**20:g}.",
        param=param,
    )


def _decode_base64(text: str, param: str) -> bytes:
    try:
        # As bytes: translating a string takes thirty times as long.
        raw = (unquote(text) if "%" in text else text).encode("ascii").translate(URL_SAFE, SPACE)
        raw = raw.rstrip(b"=")
        return base64.b64decode(raw + b"=" * (-len(raw) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidImageError("The data URL is not valid base64.", param=param) from None


def _decode_percent(text: str, param: str) -> bytes:
    try:
        return unquote_to_bytes(text)
    except UnicodeEncodeError:
        raise InvalidImageError("The data URL holds half a surrogate pair.", param=param) from None


def decode_data_url(url: str, limits: ImageLimits, param: str) -> bytes:
    """The bytes of `data:[type][;parameter]*[;base64],data`. Its media type is not believed."""
    assert is_data_url(url)
    head, comma, body = url[5:].partition(",")
    if not comma:
        raise InvalidImageError("The data URL has no comma.", param=param)
    is_base64 = any(part.strip().lower() == "base64" for part in head.split(";")[1:])
    least = len(body) // 4 * 3 if is_base64 else len(body) // 3
    if least > limits.max_bytes + limits.max_bytes // 8:  # line breaks and padding may be in it
        raise _too_large(least, limits, param)
    data = (_decode_base64 if is_base64 else _decode_percent)(body, param)
    if not data:
        raise InvalidImageError("The image is empty.", param=param)
    if len(data) > limits.max_bytes:
        raise _too_large(len(data), limits, param)
    return data


def data_url(data: bytes) -> str:
    """The data URL of an image's bytes."""
    kind = sniff(data) or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"

"""The file formats' outer structure: which format, what size, and is the file whole.

Owns magic bytes and the walks over PNG chunks, JPEG markers, GIF blocks and the WebP container.
Knows nothing of pixels. It exists because Pillow fills a damaged JPEG with grey, accepts a PNG
without its end and skips the check sums of image data.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from mmserve.errors import InvalidImageError

_MAGIC: tuple[tuple[re.Pattern[bytes], str], ...] = tuple(
    (re.compile(pattern, re.DOTALL | re.IGNORECASE), name)
    for pattern, name in (
        (rb"\x89PNG\r\n\x1a\n", "PNG"),
        (rb"\xff\xd8\xff", "JPEG"),
        (rb"RIFF....WEBP", "WEBP"),
        (rb"GIF8[79]a", "GIF"),
        (rb"....ftyp(avif|avis)", "AVIF"),
        (rb"....ftyp(heic|heix|hevc|heim|heis|mif1|msf1)", "HEIC"),
        (rb"BM....\0\0\0\0", "BMP"),
        (rb"II\*\0|MM\0\*", "TIFF"),
        (rb"\0\0\x01\0", "ICO"),
        (rb"\xff\x0a|\0\0\0\x0cJXL ", "JPEG XL"),
        (rb"%PDF", "PDF"),
        (rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?<svg", "SVG"),
        (rb"(\xef\xbb\xbf)?\s*(<!doctype html|<html)", "HTML"),
    )
)


class Header(NamedTuple):
    """What a file says of itself before any pixel is decoded; sides in pixels."""

    format: str
    width: int
    height: int


def sniff(data: bytes) -> str | None:
    """The format its first bytes announce: one of our four, another we can name, or None."""
    return next((name for magic, name in _MAGIC if magic.match(data)), None)


def read_header(data: bytes, kind: str) -> Header:
    """The size a PNG, JPEG, GIF or WEBP file states; `InvalidImageError` where it states none."""
    read_size = {"PNG": _png_size, "JPEG": _jpeg_size, "GIF": _gif_size, "WEBP": _webp_size}[kind]
    try:
        return Header(kind, *read_size(data))
    except (struct.error, IndexError) as error:
        raise InvalidImageError(f"The {kind} image is truncated.") from error


def check_whole(data: bytes, kind: str) -> None:
    """Raises `InvalidImageError` unless the file's structure is whole to the picture's end."""
    check = {"PNG": _check_png, "JPEG": _check_jpeg, "GIF": _check_gif, "WEBP": _check_webp}[kind]
    try:
        check(data)
    except (struct.error, IndexError) as error:
        raise InvalidImageError(f"The {kind} image is truncated.") from error


def _png_size(data: bytes) -> tuple[int, int]:
    if data[12:16] != b"IHDR":
        raise InvalidImageError("The PNG image does not start with its header.")
    size: tuple[int, int] = struct.unpack_from(">II", data, 16)
    return size


def _check_png(data: bytes) -> None:
    """Every chunk must be there and match its check sum."""
    position, name = 8, b""
    while name != b"IEND":
        length, name = struct.unpack_from(">I4s", data, position)
        (stored,) = struct.unpack_from(">I", data, position + 8 + length)
        body = memoryview(data)[position + 4 : position + 8 + length]
        if zlib.crc32(body) != stored:
            raise InvalidImageError("The PNG image is corrupt: a check sum is wrong.")
        position += 12 + length


_SOS, _DRI, _EOI = 0xDA, 0xDD, 0xD9
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# In compressed data 0xff starts a stuffed byte (00), a restart (d0-d7) or the next marker.
_NEXT_MARKER = re.compile(rb"\xff+[^\x00\xff\xd0-\xd7]", re.DOTALL)
_RESTART = re.compile(rb"\xff[\xd0-\xd7]")


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int]]:
    """(marker, where its length field stands) of each segment, and the end marker."""
    has_restarts, position = False, 2
    while True:
        if data[position] != 0xFF:
            raise InvalidImageError(f"The JPEG image is corrupt at byte {position}.")
        while data[position] == 0xFF:
            position += 1
        marker = data[position]
        position += 1
        if marker < 0xC0 or 0xD0 <= marker <= 0xD8:  # not one that may stand between segments
            raise InvalidImageError(f"The JPEG image is corrupt at byte {position}.")
        yield marker, position
        if marker == _EOI:
            return
        has_restarts |= marker == _DRI
        position += struct.unpack_from(">H", data, position)[0]
        if marker == _SOS:
            position = _end_of_scan(data, position, has_restarts)


def _end_of_scan(data: bytes, start: int, has_restarts: bool) -> int:
    """Where the marker after a scan's compressed data stands."""
    found = _NEXT_MARKER.search(data, start)
    if found is None:
        raise InvalidImageError("The JPEG image is truncated: its end marker is missing.")
    if not has_restarts and _RESTART.search(data, start, found.start()):
        raise InvalidImageError("The JPEG image is corrupt: a restart marker is out of place.")
    return found.start()


def _jpeg_size(data: bytes) -> tuple[int, int]:
    for marker, position in _jpeg_segments(data):
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, position + 3)
            return width, height
        if marker == _SOS:
            break
    raise InvalidImageError("The JPEG image holds no picture.")


def _check_jpeg(data: bytes) -> None:
    """Every segment up to the end marker must be well formed; what follows it is not looked at.

    libjpeg only warns of bad compressed data, and Pillow drops its warnings. Random bytes meet an
    impossible marker within some 256 bytes; damage without one is not detectable in this format.
    """
    if _SOS not in {marker for marker, _ in _jpeg_segments(data)}:
        raise InvalidImageError("The JPEG image holds no picture.")


def _gif_size(data: bytes) -> tuple[int, int]:
    size: tuple[int, int] = struct.unpack_from("<HH", data, 6)
    return size


def _check_gif(data: bytes) -> None:
    """Blocks must be whole up to the end of the first picture; later frames are not used."""
    position = 13 + _colour_table(data[10])
    while data[position] == 0x21:  # an extension
        position = _skip_blocks(data, position + 2)
    if data[position] != 0x2C:
        raise InvalidImageError("The GIF image holds no picture.")
    _skip_blocks(data, position + 11 + _colour_table(data[position + 9]))


def _colour_table(flags: int) -> int:
    """Bytes of the colour table that a flags byte announces."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _skip_blocks(data: bytes, position: int) -> int:
    while data[position]:
        position += 1 + data[position]
    return position + 1


def _webp_size(data: bytes) -> tuple[int, int]:
    """The canvas, or the single frame."""
    chunk = data[12:16]
    if chunk == b"VP8X":
        width, height, high = struct.unpack_from("<HxHB", data, 24)
        return (width | data[26] << 16) + 1, (height | high << 16) + 1
    if chunk == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if chunk == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise InvalidImageError("The WEBP image holds no picture.")


def _check_webp(data: bytes) -> None:
    """The container must be as long as it says; libwebp itself refuses an incomplete frame."""
    (length,) = struct.unpack_from("<I", data, 4)
    if length + 8 > len(data):
        raise InvalidImageError(
            f"The WEBP image is truncated: {len(data)} of {length + 8} bytes are here."
        )

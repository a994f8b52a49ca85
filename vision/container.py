"""The file formats' outer structure: which format, what size, and is the file whole.

Owns magic bytes and the walks over PNG chunks, JPEG markers, GIF blocks and the WebP container.
Knows nothing of pixels. It exists because Pillow fills a damaged JPEG with grey, accepts a PNG
without its end and skips the check sums of image data.
"""

from __future__ import annotations

import contextlib
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


# Of a GIF's, a PNG's or a WebP's parts: 20 MiB of GIF have 82,000. Parts of nothing would keep us
# busy for seconds.
_MAX_BLOCKS = 300_000


class Header(NamedTuple):
    """What a file says of itself before any pixel is decoded; sides in pixels."""

    format: str
    width: int
    height: int


def sniff(data: bytes) -> str | None:
    """The format its first bytes announce: one of our four, another we can name, or None."""
    head = data[:1000]  # some of them skip white space
    return next((name for magic, name in _MAGIC if magic.match(head)), None)


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


def count_frames(data: bytes, kind: str) -> int:
    """Of a whole file; what is no animation has one."""
    count = {"PNG": _png_frames, "GIF": _gif_frames, "WEBP": _webp_frames}.get(kind)
    return 1 if count is None else max(count(data), 1)


def _png_size(data: bytes) -> tuple[int, int]:
    if data[12:16] != b"IHDR":
        raise InvalidImageError("The PNG image does not start with its header.")
    size: tuple[int, int] = struct.unpack_from(">II", data, 16)
    return size


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """(name, name and body) of each chunk up to the last, whose check sums must be right."""
    position, name = 8, b""
    for _ in range(_MAX_BLOCKS):
        length, name = struct.unpack_from(">I4s", data, position)
        (stored,) = struct.unpack_from(">I", data, position + 8 + length)
        body = memoryview(data)[position + 4 : position + 8 + length]
        if zlib.crc32(body) != stored:
            raise InvalidImageError("The PNG image is corrupt: a check sum is wrong.")
        yield name, body
        if name == b"IEND":
            return
        position += 12 + length
    raise InvalidImageError(f"The PNG image has more than {_MAX_BLOCKS} chunks.")


def _check_png(data: bytes) -> None:
    for _ in _png_chunks(data):
        pass


def _png_frames(data: bytes) -> int:
    """As the animation's control chunk says, which stands before the picture."""
    for name, body in _png_chunks(data):
        if name == b"acTL" and len(body) >= 8:
            return int.from_bytes(body[4:8], "big")
        if name == b"IDAT":
            break
    return 1


_SOS, _DRI, _EOI = 0xDA, 0xDD, 0xD9
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# In compressed data 0xff starts a stuffed byte (00), a restart (d0-d7) or the next marker.
_NEXT_MARKER = re.compile(rb"\xff+[^\x00\xff\xd0-\xd7]", re.DOTALL)
_RESTART = re.compile(rb"\xff[\xd0-\xd7]")
_FILL = re.compile(rb"\xff+")
# A film of 20 MiB in 64 KiB pieces of metadata has 320. Millions would keep us busy for seconds.
_MAX_SEGMENTS = 10_000
# Each is a pass over the whole picture, and may be nearly empty; progressive files have some ten.
_MAX_SCANS = 100


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int]]:
    """(marker, where its length field stands) of each segment, and the end marker."""
    has_restarts, position = False, 2
    for _ in range(_MAX_SEGMENTS):
        fill = _FILL.match(data, position)
        if fill is None:
            raise InvalidImageError(f"The JPEG image is corrupt at byte {position}.")
        position = fill.end()
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
    raise InvalidImageError(f"The JPEG image has more than {_MAX_SEGMENTS} segments.")


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
    scans = sum(marker == _SOS for marker, _ in _jpeg_segments(data))
    if not scans:
        raise InvalidImageError("The JPEG image holds no picture.")
    if scans > _MAX_SCANS:
        raise InvalidImageError(f"The JPEG image has {scans} scans; the limit is {_MAX_SCANS}.")


def _gif_size(data: bytes) -> tuple[int, int]:
    size: tuple[int, int] = struct.unpack_from("<HH", data, 6)
    return size


def _check_gif(data: bytes) -> None:
    """Blocks must be whole up to the end of the first picture; later frames are not used."""
    if next(_gif_pictures(data), None) is None:
        raise InvalidImageError("The GIF image holds no picture.")


def _gif_pictures(data: bytes) -> Iterator[int]:
    """Where each whole picture ends."""
    position, in_picture, in_blocks = 13 + _colour_table(data[10]), False, False
    for _ in range(_MAX_BLOCKS):
        first = data[position]
        if in_blocks and first:
            position += 1 + first
        elif in_blocks:
            position += 1
            if in_picture:
                yield position
            in_picture = in_blocks = False
        elif first == 0x21:  # an extension
            position, in_blocks = position + 2, True
        elif first == 0x2C:
            position += 10 + _colour_table(data[position + 9]) + 1
            in_picture = in_blocks = True
        else:
            return
    raise InvalidImageError(f"The GIF image has more than {_MAX_BLOCKS} blocks.")


def _gif_frames(data: bytes) -> int:
    count = 0
    with contextlib.suppress(IndexError):  # what is cut off behind the first one is not missed
        for _ in _gif_pictures(data):
            count += 1
    return count


def _colour_table(flags: int) -> int:
    """Bytes of the colour table that a flags byte announces."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


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


def _webp_frames(data: bytes) -> int:
    position, count = 12, 0
    for _ in range(_MAX_BLOCKS):
        if position + 8 > len(data):
            return count
        name, length = struct.unpack_from("<4sI", data, position)
        count += name == b"ANMF"
        position += 8 + length + (length & 1)
    raise InvalidImageError(f"The WEBP image has more than {_MAX_BLOCKS} chunks.")

"""A process that decodes images of strangers, one after another, within limits of its own.

Owns the messages between the two ends, and what the process may use: a bounded address space, no
file, no core dump. It has Pillow and NumPy in it, no PyTorch and no secret: its caller gives it a
bare environment. Knows nothing of the caller but one socket; when that ends, so does the process.
"""

from __future__ import annotations

import io
import json
import os
import socket
import struct
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image

from mmserve.config import MIB, ImageLimits
from mmserve.errors import (
    ImageTooLargeError,
    InvalidImageError,
    RequestError,
    UnsupportedImageTypeError,
)
from mmserve.vision import preprocess

READY = b"\x01"  # said once, before the first request
# The side wanted (0: the picture's own size), how many crops beside the whole, bytes that follow.
REQUEST = struct.Struct("<III")
REPLY = struct.Struct("<BIII")  # a fault's number or 0, width, height, bytes that follow
FAULTS = (InvalidImageError, UnsupportedImageTypeError, ImageTooLargeError)
MAX_WORDS = 1000  # bytes of a fault's message

# The dearest picture takes 28 bytes a pixel: the first of an animated WebP, on white.
PIXEL_BYTES = 36
MARGIN_BYTES = 128 * MIB


class EndedError(Exception):
    """The other end is gone."""


def receive(end: socket.socket, buffer: memoryview, deadline: float | None = None) -> None:
    """Fill the buffer. Raises `EndedError`, or TimeoutError at the deadline (monotonic)."""
    while buffer:
        if deadline is not None:
            end.settimeout(max(deadline - time.monotonic(), 1e-3))
        count = end.recv_into(buffer)
        if not count:
            raise EndedError
        buffer = buffer[count:]


def memory_limit(limits: ImageLimits) -> int:
    """Bytes that decoding may take beside the program itself."""
    return MARGIN_BYTES + 4 * limits.max_bytes + PIXEL_BYTES * limits.max_pixels


def _warm_up(limits: ImageLimits) -> None:
    """Load what each codec loads when it is first used."""
    for kind in limits.formats:
        file = io.BytesIO()
        Image.new("RGB", (1, 1)).save(file, kind)
        preprocess.decode(file.getvalue(), ImageLimits(), 1)


def _confine(limits: ImageLimits) -> None:
    import resource  # POSIX only, as this process is

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    statm = Path("/proc/self/statm")
    if statm.exists():  # elsewhere the limit is not kept by the kernel
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        most = used + memory_limit(limits)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)  # what codecs print of strangers' bytes is nobody's log


def _decoded(
    data: bytes, limits: ImageLimits, size: int, crops: int
) -> tuple[int, int, memoryview]:
    """(width, height, pixels as the caller lays them out); pieces lie one below the other."""
    if size:
        pieces = preprocess.decode_pieces(data, limits, size, crops)
        return size, size * len(pieces), pieces.data.cast("B")
    image = preprocess.decode_full(data, limits)
    return *image.size, np.asarray(image).data.cast("B")


def _reply(data: bytes, limits: ImageLimits, size: int, crops: int) -> tuple[bytes, memoryview]:
    try:
        width, height, pixels = _decoded(data, limits, size, crops)
        return REPLY.pack(0, width, height, len(pixels)), pixels
    except MemoryError:
        fault: RequestError = ImageTooLargeError(
            "The image needs more memory to decode than an image may."
        )
    except RequestError as error:
        fault = error
    words = fault.message.encode("utf-8", "replace")[:MAX_WORDS]
    number = 1 + FAULTS.index(type(fault))
    return REPLY.pack(number, 0, 0, len(words)), memoryview(words)


def serve(end: socket.socket, limits: ImageLimits) -> None:
    """Answer until the other end closes."""
    end.sendall(READY)
    head = bytearray(REQUEST.size)
    while True:
        try:
            receive(end, memoryview(head))
            size, crops, length = REQUEST.unpack(head)
            data = bytearray(length)
            receive(end, memoryview(data))
        except EndedError:
            return
        for part in _reply(bytes(data), limits, size, crops):
            end.sendall(part)


def main() -> None:
    """Arguments: the socket's descriptor, and the limits as JSON."""
    number, text = sys.argv[1:]
    values = json.loads(text)
    limits = ImageLimits(**{**values, "formats": tuple(values["formats"])})
    _warm_up(limits)
    _confine(limits)
    with socket.socket(fileno=int(number)) as end:
        serve(end, limits)


if __name__ == "__main__":
    main()

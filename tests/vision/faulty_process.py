"""A decoding process whose codecs have faults: the last bytes of a file say which."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from mmserve.config import ImageLimits
from mmserve.vision import decode_process
from mmserve.vision.decode_process import REPLY

REAL = decode_process._reply
# Answers that no sound process gives.
LIES = {
    b"short": (REPLY.pack(0, 8, 8, 10), b"x" * 10),
    b"huge": (REPLY.pack(0, 60_000, 60_000, 3), b"xyz"),
    b"fault": (REPLY.pack(99, 0, 0, 4), b"oops"),
    b"words": (REPLY.pack(1, 0, 0, 2**31), b""),
}


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _hog() -> None:
    held = [bytearray(1 << 24)]
    while True:
        held.append(bytearray(1 << 24))


ACTS: dict[bytes, Callable[[], None]] = {
    b"crash": _crash,
    b"hang": lambda: time.sleep(3600),
    b"leave": lambda: os._exit(0),
    b"hog": _hog,
}


def _decoded(
    data: bytes, limits: ImageLimits, size: int, crops: int
) -> tuple[int, int, memoryview]:
    for word, act in ACTS.items():
        if data.endswith(word):
            act()
    return decode(data, limits, size, crops)


def _reply(data: bytes, limits: ImageLimits, size: int, crops: int) -> tuple[bytes, memoryview]:
    for word, (head, body) in LIES.items():
        if data.endswith(word):
            return head, memoryview(body)
    return REAL(data, limits, size, crops)


if __name__ == "__main__":
    decode = decode_process._decoded
    decode_process._decoded = _decoded
    decode_process._reply = _reply
    decode_process.main()

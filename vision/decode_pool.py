"""Processes that decode images: a crash or a hang in a codec costs one image.

Owns the processes: their number, their time, and putting a new one in the place of one that ended.
What they do is `decode_process`'s; of what they answer, nothing is believed that does not fit.
Knows nothing of requests.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from typing import NamedTuple

import numpy as np
from PIL import Image

from mmserve.config import MIB, ImageLimits
from mmserve.errors import InvalidImageError
from mmserve.vision import decode_process as wire
from mmserve.vision.preprocess import Pixels, check_header

log = logging.getLogger(__name__)

START_S = 60.0  # for a new process to be ready, on a machine under load
# What a program may need to run at all. Nothing else: keys are among the rest.
KEPT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "TMPDIR")
GIVEN = {
    "OPENBLAS_NUM_THREADS": "1",  # each would have memory of its own
    # glibc's: memory of one picture is used for the next, up to 128 MiB. Asking the kernel anew for
    # each page made a picture of 12 megapixels twice as slow.
    "MALLOC_MMAP_THRESHOLD_": str(32 * MIB),
    "MALLOC_TRIM_THRESHOLD_": str(128 * MIB),
}


class _Answer(NamedTuple):
    width: int
    height: int
    pixels: Pixels  # flat


def _start(limits: ImageLimits) -> tuple[subprocess.Popen[bytes], socket.socket]:
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    # The same packages as here, wherever they were found.
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    ours, theirs = socket.socketpair()
    with theirs:
        child = subprocess.Popen(
            [
                *(sys.executable, "-m", wire.__name__, str(theirs.fileno())),
                json.dumps(asdict(limits)),
            ],
            pass_fds=(theirs.fileno(),),
            env={**kept, **GIVEN, "PYTHONPATH": path},
            cwd=os.sep,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the server, which then ends it
        )
    return child, ours


class _Worker:
    """One process at a time, used by one thread at a time."""

    def __init__(self, limits: ImageLimits) -> None:
        self._limits = limits
        self._child: subprocess.Popen[bytes] | None = None
        self._ready = False

    def start(self) -> None:
        """Begin to start, if there is no process; `ask` waits for it."""
        if self._child is None or self._child.poll() is not None:
            self.stop()
            self._child, self._end = _start(self._limits)

    def stop(self) -> int | None:
        """End the process; what it ended with."""
        if self._child is None:
            return None
        self._child.kill()
        self._end.close()
        code = self._child.wait()
        self._child, self._ready = None, False
        return code

    def kill(self) -> None:
        """From any thread; whoever uses it then sees its end."""
        if (child := self._child) is not None:
            child.kill()

    def _receive(self, length: int, deadline: float) -> Pixels:
        made = np.empty(length, np.uint8)
        wire.receive(self._end, made.data, deadline)
        return made

    def await_ready(self) -> None:
        """Raises OSError where the machine cannot run it: no image's fault."""
        self.start()
        if self._ready:
            return
        try:
            self._receive(len(wire.READY), time.monotonic() + START_S)
        except (wire.EndedError, OSError) as error:
            raise OSError(f"no process to decode images can be started ({self.stop()})") from error
        self._ready = True

    def ask(self, data: bytes, size: int, crops: int, seconds: float) -> _Answer:
        """Raises the fault it names; EndedError, OSError or TimeoutError for its own end."""
        deadline = time.monotonic() + seconds
        self._end.settimeout(seconds)
        self._end.sendall(wire.REQUEST.pack(size, crops, len(data)))
        self._end.sendall(data)
        head = self._receive(wire.REPLY.size, deadline)
        fault, width, height, length = wire.REPLY.unpack(head.data)
        if fault:
            if fault > len(wire.FAULTS) or length > wire.MAX_WORDS:
                raise wire.EndedError
            words = self._receive(length, deadline).tobytes()
            raise wire.FAULTS[fault - 1](words.decode("utf-8", "replace"))
        sound = length == 3 * width * height
        if size:
            sound &= (width, height) == (size, size * (1 + crops))
        else:
            sound &= 0 < width * height <= self._limits.max_pixels
        if not sound:
            raise wire.EndedError
        return _Answer(width, height, self._receive(length, deadline))


class DecodePool:
    """`count` processes, each with `max_seconds` an image."""

    def __init__(self, limits: ImageLimits, count: int, max_seconds: float) -> None:
        self.limits = limits
        self._max_seconds = max_seconds
        self._open = True
        self._workers = [_Worker(limits) for _ in range(count)]
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for worker in self._workers:
            worker.start()  # so that they are ready by the first image
            self._idle.put(worker)

    def decode(self, data: bytes, size: int, crops: int = 0) -> Pixels:
        answer = self._ask(data, size, crops)
        return answer.pixels.reshape(1 + crops, 3, size, size)

    def decode_full(self, data: bytes) -> Image.Image:
        answer = self._ask(data, 0)
        return Image.fromarray(answer.pixels.reshape(answer.height, answer.width, 3))

    def close(self) -> None:
        self._open = False
        idle = []
        with contextlib.suppress(queue.Empty):
            while True:
                idle.append(self._idle.get_nowait())
        for worker in self._workers:
            worker.kill()
        for worker in idle:
            worker.stop()
            self._idle.put(worker)

    def _ask(self, data: bytes, size: int, crops: int = 0) -> _Answer:
        check_header(data, self.limits)  # what is refused at once keeps nobody waiting
        worker = self._idle.get()
        try:
            worker.await_ready()
            return worker.ask(data, size, crops, self._max_seconds)
        except TimeoutError:
            self._replace(worker, "was too slow")
            raise InvalidImageError(
                f"The image takes longer than {self._max_seconds:g} s to decode."
            ) from None
        except (wire.EndedError, ConnectionError):
            self._replace(worker, "ended")
            raise InvalidImageError("The image cannot be decoded: the decoder failed.") from None
        finally:
            self._idle.put(worker)

    def _replace(self, worker: _Worker, why: str) -> None:
        code = worker.stop()
        if self._open:
            log.warning("a process that decodes images %s (%s); another takes its place", why, code)
            worker.start()

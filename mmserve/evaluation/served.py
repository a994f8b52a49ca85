"""A server of one's own for as long as it is asked.

Owns its process, and the port that is free. Knows nothing of what is asked.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from mmserve.evaluation.client import ServerError, request

START_S = 600  # the first start fetches and converts the base model


@contextmanager
def serving(flags: Sequence[str]) -> Iterator[str]:
    """`mmserve serve` with these flags, ready, by its address; it keeps nothing."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mmserve", "serve", "--port", str(port)]
    with tempfile.TemporaryFile() as log:  # it writes a line a request
        server = subprocess.Popen([*command, "--data-dir", "none", *flags], stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}"
        try:
            _wait_for(server, url, log)
            yield url
        finally:
            server.terminate()
            server.wait()


def _wait_for(server: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while True:
        if server.poll() is not None:
            log.seek(0)
            said = log.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
            raise ServerError(f"the server ended with {server.returncode}: {said[-1]}")
        try:
            request(f"{url}/v1/models", "none")
            return
        except ServerError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.3)

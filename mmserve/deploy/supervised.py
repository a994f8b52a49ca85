"""`mmserve` in a process that ends with whoever started it.

Run: python -m mmserve.deploy.supervised serve … (over a pipe as its standard input).

Owns the leash: a standard input that closes is a SIGTERM, so that a server drains where its
supervisor was killed. Knows nothing of what runs.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def _hold() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


def leash() -> None:
    threading.Thread(target=_hold, name="leash", daemon=True).start()


def main() -> None:
    leash()
    runpy.run_module("mmserve", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

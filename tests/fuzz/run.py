"""Fuzz what strangers send, guided by coverage, until it is stopped or finds something.

Run: python tests/fuzz/run.py images [-max_total_time=600 and other options of libFuzzer]

Needs `pip install 'mmserve[fuzz]'`. What it finds lies in the working folder as crash-…; put it
among the seeds once it is mended.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

sys.path.append(str(Path(__file__).parents[2]))

with atheris.instrument_imports(include=["mmserve", "PIL"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    name, *options = sys.argv[1:] or [""]
    if name not in TARGETS:
        sys.exit(f"one of: {', '.join(TARGETS)}")
    target, seeds = TARGETS[name]
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(seeds()):
            (Path(corpus) / str(number)).write_bytes(seed)
        atheris.Setup([sys.argv[0], corpus, "-max_len=65536", *options], target)
        atheris.Fuzz()


if __name__ == "__main__":
    main()

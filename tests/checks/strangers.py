"""Pictures of strangers against a served model: Pillow's own test pictures and those that we make.
Each is shown or refused by name, in two seconds at most, and memory stays where it was.

Run: python tests/checks/strangers.py [--pictures FOLDER] [--seconds 2]   (starts its own server)

Without a folder, Pillow's source package is fetched with pip, of the version that is installed.
"""

from __future__ import annotations

import argparse
import base64
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import httpx
import PIL

sys.path.append(str(Path(__file__).parents[2]))

from tests.checks.served import Served, picture, serving
from tests.vision.strangers import strangers

LIMIT_S = 2.0  # on a machine that does nothing else
GROWTH = 64 * 2**20  # bytes, of the server between two rounds
QUESTION = "What is this?"


def pillows(folder: Path) -> Path | None:
    """Its test pictures, unpacked into a folder; None where there is no package index."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
    command += ["--quiet", "--dest", str(folder), f"pillow=={PIL.__version__}"]
    if subprocess.run(command, capture_output=True, timeout=600).returncode:
        return None
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        inside = [m for m in tar.getmembers() if m.isfile() and "/Tests/images/" in m.name]
        tar.extractall(folder, members=inside, filter="data")
    return folder


def ask(client: httpx.Client, data: bytes) -> httpx.Response:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    content = [QUESTION, {"type": "image_url", "image_url": {"url": url}}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
    return client.post("/v1/chat/completions", json=body)


def check(
    served: Served, files: Iterable[tuple[str, bytes]], limit: float = LIMIT_S
) -> Counter[str]:
    """How often each outcome was; raises for a fault or a hang."""
    client = httpx.Client(base_url=served.url, timeout=60)
    good = picture(1)
    ask(client, good)
    expected = ask(client, good).json()["choices"]
    outcomes: Counter[str] = Counter()
    slowest = (0.0, "")
    for name, data in files:
        started = time.monotonic()
        answer = ask(client, data)
        seconds = time.monotonic() - started
        assert answer.status_code in (200, 400), (name, answer.status_code, answer.text)
        assert seconds < limit, (name, seconds)
        slowest = max(slowest, (seconds, name))
        ok = answer.status_code == 200
        outcomes["shown" if ok else answer.json()["error"]["code"]] += 1
    assert ask(client, good).json()["choices"] == expected, "the next request is answered as ever"
    print(f"slowest: {slowest[1]}, {slowest[0]:.2f} s")
    return outcomes


def check_twice(served: Served, files: list[tuple[str, bytes]], limit: float) -> Counter[str]:
    outcomes = check(served, files, limit)
    before = served.memory()
    assert check(served, files, limit) == outcomes
    grown = served.memory() - before
    print(f"{len(files)} files, {grown / 2**20:.1f} MiB grown by the second round")
    assert grown < GROWTH, f"{grown / 2**20:.0f} MiB grown"
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="that each may take")
    args = parser.parse_args()
    ours = [(name, data) for name, data, _ in strangers()]
    with tempfile.TemporaryDirectory() as temporary, serving() as served:
        print(f"ours: {dict(check_twice(served, ours, args.seconds))}")
        folder = args.pictures or pillows(Path(temporary))
        if folder is None:
            print("Pillow's are not to be had here")
            return
        theirs = [(str(p), p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()]
        theirs = [(name, data) for name, data in theirs if not name.endswith(".tar.gz")]
        print(f"Pillow's: {dict(check_twice(served, theirs, args.seconds))}")


if __name__ == "__main__":
    main()

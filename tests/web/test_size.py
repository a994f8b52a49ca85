"""How much script the chat page needs before it can be used: measured on the built files."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import mmserve

BUILT = Path(mmserve.__file__).parent / "webui"
MOST = 90_000  # bytes, gzip
SCRIPT = re.compile(r'<script[^>]* src="\./([^"]+)"')
IMPORT = re.compile(r'(?:from|^import|;import)"\./([\w.-]+\.js)"')


def first_load() -> dict[str, int]:
    """The scripts that the page loads by itself, with what they import, and their sizes."""
    waiting = SCRIPT.findall((BUILT / "index.html").read_text())
    sizes: dict[str, int] = {}
    while waiting:
        name = waiting.pop()
        if name in sizes:
            continue
        text = (BUILT / name).read_bytes()
        sizes[name] = len(gzip.compress(text, 9))
        folder = name.rpartition("/")[0]
        waiting += [f"{folder}/{other}" for other in IMPORT.findall(text.decode())]
    return sizes


def test_the_first_load_is_at_most_90_kb_of_script() -> None:
    sizes = first_load()
    print(sizes)
    assert len(sizes) >= 2
    assert sum(sizes.values()) <= MOST


def test_what_few_need_is_loaded_when_they_need_it() -> None:
    later = {path.name.partition("-")[0] for path in (BUILT / "assets").glob("*.js")}
    assert {"highlight", "math", "Settings", "Shelf", "Lightbox", "Help"} <= later
    assert not any("math" in name or "highlight" in name for name in first_load())

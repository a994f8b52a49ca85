"""The official npm SDK against the server. Installs it once into a cache folder."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.server.conftest import Running

SOURCES = Path(__file__).parent / "node"


def installed() -> Path:
    """A folder with the SDK, one for each content of package.json."""
    package = (SOURCES / "package.json").read_bytes()
    name = f"mmserve-node-{hashlib.sha256(package).hexdigest()[:12]}"
    folder = Path(tempfile.gettempdir()) / name
    if not (folder / "done").exists():
        folder.mkdir(exist_ok=True)
        (folder / "package.json").write_bytes(package)
        command = ["npm", "install", "--no-audit", "--no-fund", "--silent"]
        subprocess.run(command, cwd=folder, check=True, timeout=300)
        (folder / "done").touch()
    return folder


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node and npm")
def test_the_npm_sdk_chats_streams_and_uses_the_socket(server: Running) -> None:
    folder = installed()
    shutil.copy(SOURCES / "check.mjs", folder)
    command = ["node", "check.mjs", f"{server.url}/v1", str(server.key)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "ok"

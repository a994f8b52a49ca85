"""The official npm SDK against the server. Installs it once into a cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.conftest import KEY, Running

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


def run(script: str, url: str, key: str | None = None, **environment: str) -> str:
    folder = installed()
    shutil.copy(SOURCES / script, folder)
    command = ["node", script, f"{url}/v1", str(key)]
    result = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node and npm")
def test_the_npm_sdk_chats_streams_and_uses_the_socket(server: Running) -> None:
    assert run("check.mjs", server.url, server.key) == "ok"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node and npm")
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl for a certificate")
def test_the_npm_sdk_holds_a_realtime_conversation(
    launch: Callable[..., Running], tmp_path: Path
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    running = launch(api_keys=(KEY,), ssl_certfile=certificate, ssl_keyfile=key)
    assert (
        run("realtime.mjs", running.url, running.key, NODE_EXTRA_CA_CERTS=str(certificate)) == "ok"
    )

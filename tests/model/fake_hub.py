"""A hub of our own on a local port: enough of the Hugging Face API for its client library.

Owns repositories in memory and the answers to listing and fetching; it counts what was fetched.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SHA = "5" * 40  # the commit of every repository
LARGE = (".safetensors", ".gguf", ".bin", ".pth")  # stored by their SHA-256, as with Git LFS


@dataclass
class FakeHub:
    """`repos` by id, each files by name. `gated` ids answer as the hub does without permission."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    fetched: list[str] = field(default_factory=list)
    endpoint: str = ""

    def add(self, repo: str, folder: Path, **more: bytes) -> None:
        files = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
        self.repos[repo] = {**files, **more}

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        parts = path.split("?")[0].strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        rest = parts[2:] if api else parts
        repo, rest = "/".join(rest[:2]), rest[2:]
        if repo in self.gated:
            return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"}, b""
        if repo not in self.repos:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        files = self.repos[repo]
        if len(rest) > 1 and rest[1] not in ("main", "v2", SHA):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if api and rest[:1] == ["tree"]:
            return 200, {}, json.dumps([_entry(n, data) for n, data in files.items()]).encode()
        if api:
            siblings = [{"rfilename": name} for name in files]
            about: dict[str, Any] = {"id": repo, "sha": SHA, "siblings": siblings}
            return 200, {}, json.dumps(about).encode()
        name = "/".join(rest[2:])
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 200, {"ETag": f'"{_etag(name, files[name])}"', "X-Repo-Commit": SHA}, files[name]


def _etag(name: str, data: bytes) -> str:
    return (hashlib.sha256 if name.endswith(LARGE) else hashlib.sha1)(data).hexdigest()


def _entry(name: str, data: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
    if name.endswith(LARGE):
        entry["lfs"] = {"oid": _etag(name, data), "size": len(data), "pointerSize": 134}
    return entry


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._reply(with_body=False)

        def do_GET(self) -> None:
            self._reply(with_body=True)

        def _reply(self, with_body: bool) -> None:
            status, headers, body = hub.answer(self.path)
            if with_body and "/resolve/" in self.path:
                hub.fetched.append(self.path.split("/resolve/")[1].split("/", 1)[1])
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()

"""`mmserve kv`: files of keys and values, taken from a running server, brought to one, and shown.

Owns these commands and their way over HTTP. Knows nothing of engines.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from mmserve import flags
from mmserve.whole_file import replacing

TIMEOUT_S = 600.0  # without a byte


def add_kv_commands(commands: Any) -> None:
    """The command and its acts, on the parsers of the command line."""
    kv = commands.add_parser("kv", help="files of keys and values (docs/kv-format.md)")
    acts = kv.add_subparsers(required=True, metavar="act")
    inspecting = acts.add_parser("inspect", help="what a file holds, its checksums compared")
    inspecting.add_argument("file", type=flags.file)
    inspecting.set_defaults(run=_inspect)
    exporting = acts.add_parser("export", help="write all KV that a server has cached")
    exporting.add_argument("file", type=Path)
    exporting.set_defaults(run=_export)
    importing = acts.add_parser("import", help="make a file's KV known to a server")
    importing.add_argument("file", type=flags.file)
    importing.set_defaults(run=_import)
    for act in (exporting, importing):
        act.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
        act.add_argument(
            "--admin-key",
            default=os.environ.get("MMSERVE_ADMIN_KEY", "").partition(" ")[0],
            help="one that the server was started with (default: $MMSERVE_ADMIN_KEY)",
        )


def _inspect(args: argparse.Namespace) -> None:
    from mmserve.kvfile.inspect import inspect

    print(inspect(args.file))


def _export(args: argparse.Namespace) -> None:
    with replacing(args.file) as part, part.open("wb") as file:
        with _asked(args, "GET") as answer:
            shutil.copyfileobj(answer, file, 1 << 20)
    print(f"{args.file.stat().st_size} bytes in {args.file}")


def _import(args: argparse.Namespace) -> None:
    with args.file.open("rb") as file, _asked(args, "POST", file) as answer:
        told = json.load(answer)
    for kind, unit in (("text", "tokens"), ("images", "images")):
        part = told[kind]
        print(
            f"{kind:6} {part['new']} {unit} new, {part['known']} known, {part['left_out']} left out"
        )
    if found := told.get("divergence"):
        nats = "-" if found["nats"] is None else f"{found['nats']:.4f} nats"
        same = f"{found['same_first_token']} of {found['prompts']} next tokens are the same"
        print(f"other weights' KV, declared compatible: {same}, divergence {nats}")


@contextmanager
def _asked(
    args: argparse.Namespace, method: str, body: BinaryIO | None = None
) -> Iterator[http.client.HTTPResponse]:
    """The server's answer, a good one. Ends the program with one sentence otherwise."""
    url = urlsplit(args.url)
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    if url.scheme not in kinds or not url.hostname:
        raise ValueError(f"--url must be http://HOST:PORT or https://HOST:PORT, not {args.url!r}")
    connection = kinds[url.scheme](url.hostname, url.port, timeout=TIMEOUT_S)
    headers = {"Authorization": f"Bearer {args.admin_key}"} if args.admin_key else {}
    if body is not None:
        headers["Content-Length"] = str(os.fstat(body.fileno()).st_size)
    try:
        connection.request(method, f"{url.path.rstrip('/')}/v1/kv", body, headers)
        answer = connection.getresponse()
        if answer.status != 200:
            sys.exit(f"mmserve: {args.url} refused: {_reason(answer)}")
        yield answer
    except (OSError, http.client.HTTPException) as error:
        sys.exit(f"mmserve: {args.url} does not answer: {error}")
    finally:
        connection.close()


def _reason(answer: http.client.HTTPResponse) -> str:
    try:
        return str(json.load(answer)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"status {answer.status}"

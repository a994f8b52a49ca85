"""Schemathesis asks a server of the tiny model whatever its /openapi.json allows, and what it does
not: no answer is a fault of ours, none has a status, a content type or a form that is not
described, and what is wrong is refused.

Run: python tests/checks/described.py [--seconds 600] [--examples 100] [--seed 1]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

sys.path.append(str(Path(__file__).parents[2]))

import torch

from mmserve.config import ServerConfig
from mmserve.engine.async_engine import AsyncEngine
from mmserve.engine.engine import Engine
from tests.engine.tiny import tiny_config, tiny_model
from tests.server.conftest import ADMIN_KEY, KEY, Running, eventually, start

CONTEXT = 128  # tokens: an answer without a limit goes on until it is full
# What is right by the schema may still be too long, name nothing or contradict itself.
UNCHECKED = "positive_data_acceptance"
# 504 is no fault where the client's own time is up, and the shortest is a time, too.
SETTINGS = f"""
hooks = "described_hooks"
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 504]
[auth.openapi.key]
bearer = "{KEY}"
[auth.openapi.admin_key]
bearer = "{ADMIN_KEY}"
"""
# An empty array in a form is nothing at all, and so no wrong value of a field that may be missing.
HOOKS = """
import schemathesis

@schemathesis.hook
def filter_body(context, body):
    form = context.operation is not None and context.operation.path == "/v1/files"
    return not (form and isinstance(body, dict) and [] in body.values())
"""


@contextmanager
def served() -> Iterator[Running]:
    """A server in this process, whose answers `Witness` looks at, too."""
    config = tiny_config(text_pages=400, vision_pages=80)
    engine = AsyncEngine(config, lambda config: Engine(config, tiny_model(CONTEXT)))
    server = ServerConfig(port=0, api_keys=(KEY,), admin_keys=(ADMIN_KEY,), host_memory_limit=0)
    running, stop = start(server, cast(Any, engine))
    try:
        assert eventually(lambda: engine.status == "ok")
        yield running
    finally:
        stop()


def ask(url: str, *options: str) -> subprocess.CompletedProcess[str]:
    """All checks but one, and otherwise as `options` say."""
    with tempfile.TemporaryDirectory() as folder:  # its own, so that nothing is left in ours
        settings = Path(folder) / "schemathesis.toml"
        settings.write_text(SETTINGS)
        (Path(folder) / "described_hooks.py").write_text(HOOKS)
        return subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(settings)),
                *("run", f"{url}/openapi.json", "-H", f"Authorization: Bearer {KEY}"),
                *("--exclude-checks", UNCHECKED, "--warnings", "off"),
                *("--request-timeout", "60", *options),
            ],
            capture_output=True,
            text=True,
            cwd=folder,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)  # so small a model gains nothing from more
    with served() as running:
        limits = ("--max-time", str(args.seconds), "-n", str(args.examples))
        fresh = ("--seed", str(args.seed), "--generation-database", "none")
        asked = ask(running.url, *limits, *fresh, "--continue-on-failure")
    print(asked.stdout, asked.stderr)
    sys.exit(asked.returncode)


if __name__ == "__main__":
    main()

"""What a Ray Serve config file names: `import_path: mmserve.serve_app:build`, with the flags of
`mmserve deploy` as `args: {flags: [...]}`. Joins the command line's ends, and owns nothing.
"""

from __future__ import annotations

from typing import Any

from mmserve.__main__ import build_parser, server_config
from mmserve.deploy.application import application
from mmserve.deploy.command import launch_of


def build(args: dict[str, Any]) -> Any:
    """Raises `SystemExit` for a flag that is none, as the command does."""
    words = ["--host", "0.0.0.0", *map(str, args["flags"])]
    asked = build_parser().parse_args(["deploy", *words])
    return application(launch_of(asked, server_config(asked), words))

"""`mmserve train`: how the model in the box was made, from free packages on.

Owns its flags. Knows nothing of what is fetched, drawn or trained.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_vision_command(commands: Any) -> None:
    """The command on the parsers of the command line."""
    parser = commands.add_parser("train", help="make the model in the box (docs/training.md)")
    parser.add_argument(
        "--fetch",
        action="store_true",
        required=True,
        help="download fonts, emoji and pictures by npm and pip, and make one archive of them",
    )
    parser.add_argument(
        "--assets",
        type=Path,
        metavar="FILE",
        help="that archive (default: train-assets.zip in the platform's folder for caches)",
    )
    parser.set_defaults(run=_train)


def _train(args: argparse.Namespace) -> None:
    from mmserve.vision.train.fetch import default_path, fetch

    target = args.assets or default_path()
    print(f"Fetching fonts, emoji and pictures into {target}; this takes some minutes.", flush=True)
    fetch(target)
    print(f"{target}: {target.stat().st_size / 1e6:.1f} MB")

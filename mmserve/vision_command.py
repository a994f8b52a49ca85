"""`mmserve train`: how the model in the box was made, from free packages on.

Owns its flags. Knows nothing of what is fetched, drawn or trained.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from mmserve import flags
from mmserve.config import EngineConfig, ModelConfig
from mmserve.engine_flags import cache_dir


def add_vision_command(commands: Any) -> None:
    """The command on the parsers of the command line."""
    parser = commands.add_parser("train", help="make the model in the box (docs/training.md)")
    add = parser.add_argument
    add(
        "stage", nargs="?", type=flags.file, metavar="STAGE", help="a JSON such as in configs/train"
    )
    add(
        "--fetch",
        action="store_true",
        help="download fonts, emoji and pictures by npm and pip, and make one archive of them",
    )
    add(
        "--assets",
        type=Path,
        metavar="FILE",
        help="that archive (default: train-assets.zip in the platform's folder for caches)",
    )
    add("--out", type=Path, metavar="FOLDER", help="for the model, which `--model FOLDER` serves")
    add(
        "--work",
        type=Path,
        metavar="FOLDER",
        help="where a training is kept, to be gone on with (default: OUT.work)",
    )
    add("--minutes", type=float, default=9.0, help="for this call; the next goes on from its end")
    add(
        "--workers",
        type=flags.number,
        default=max((os.cpu_count() or 1) - 2, 0),
        help="processes that draw (default: the cores but two)",
    )
    add("--device", default=ModelConfig.device, choices=("auto", "cpu", "cuda"))
    add("--cache-dir", type=Path, help="where fetched weights live (default: ~/.cache/mmserve)")
    parser.set_defaults(run=_train)


def _train(args: argparse.Namespace) -> None:
    from mmserve.vision.train.fetch import default_path

    assets = args.assets or default_path()
    if not (args.stage and args.out) and (args.stage or not args.fetch):
        raise ValueError("train needs a stage and --out, or --fetch")
    if args.fetch:
        _fetch(assets)
    if args.stage:
        from mmserve.vision.train.recipe import Options, train
        from mmserve.vision.train.stage import load_stage

        work = args.work or args.out.with_name(args.out.name + ".work")
        options = Options(args.out, work, assets, args.minutes, args.workers)
        model = ModelConfig(device=args.device, cache_dir=cache_dir(args))
        train(load_stage(args.stage), options, EngineConfig(model=model))


def _fetch(target: Path) -> None:
    from mmserve.vision.train.fetch import fetch

    print(f"Fetching fonts, emoji and pictures into {target}; this takes some minutes.", flush=True)
    fetch(target)
    print(f"{target}: {target.stat().st_size / 1e6:.1f} MB")

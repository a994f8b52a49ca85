"""`mmserve train-drafter`: a head that drafts for a model, from the model alone.

Owns its flags. Knows nothing of how heads are made.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmserve import flags
from mmserve.config import EngineConfig


def add_train_command(
    commands: Any,
    add_engine_flags: Callable[[argparse.ArgumentParser], None],
    engine_config: Callable[[argparse.Namespace], EngineConfig],
) -> None:
    """The command on the parsers of the command line."""
    parser = commands.add_parser(
        "train-drafter", help="make a head that drafts for a model (docs/speculation.md)"
    )
    add = parser.add_argument
    add("--method", choices=("eagle", "medusa"), default="eagle")
    add("--out", type=Path, required=True, metavar="FOLDER", help="for the head")
    add(
        "--work",
        type=Path,
        metavar="FOLDER",
        help="where texts and states are kept, to be gone on with (default: OUT.work)",
    )
    add("--writers", type=flags.count, default=1, help="processes that write, on one device")
    add("--minutes", type=float, default=7.0, help="for all of it")
    add("--tokens", type=flags.count, default=3_000_000, help="of answers to train on, at most")
    add("--updates", type=flags.count, default=100_000, help="at most")
    add("--vocab", type=flags.count, default=8192, help="eagle: tokens that can be guessed")
    add("--steps", type=flags.count, default=5, help="guesses in a row that are trained")
    add("--rate", type=float, default=1e-3, help="learning rate")
    add("--batch-tokens", type=flags.count, default=16_384, help="of an update")
    add(
        "--taps",
        type=_layers,
        default=(-1,),
        metavar="N,N",
        help="eagle: the layers that are read; -1 is behind the final norm",
    )
    add("--seed", type=int, default=0)
    add_engine_flags(parser)
    parser.set_defaults(max_num_seqs=160, max_num_batched_tokens=256)
    parser.set_defaults(run=lambda args: _train(args, engine_config(args)))


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of layers such as 2,14,27") from None


def _train(args: argparse.Namespace, config: EngineConfig) -> None:
    from mmserve.train_drafter.recipe import Options, train

    names = (
        "method",
        "writers",
        "minutes",
        "tokens",
        "updates",
        "vocab",
        "steps",
        "rate",
        "batch_tokens",
    )
    given = {name: getattr(args, name) for name in (*names, "taps", "seed")}
    work = args.work or args.out.with_name(args.out.name + ".work")
    train(Options(out=args.out, work=work, **given), config)

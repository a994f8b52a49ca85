"""`mmserve eval`: its flags, and the order in which everything is measured.

Owns both. Knows nothing of how a question is asked or scored.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mmserve import flags
from mmserve.config import ModelConfig
from mmserve.evaluation.rows import ROWS, Row

TEXT_PROMPTS = 200  # at most; no more than questions a skill


def add_eval_command(commands: Any) -> None:
    """The command on the parsers of the command line."""
    parser = commands.add_parser("eval", help="what the model in the box can do (docs/training.md)")
    add = parser.add_argument
    model = ModelConfig()
    add("--n", type=flags.count, default=500, help="questions of a skill")
    skills = sorted({row.skill for row in ROWS})
    add("--skill", action="append", choices=skills, help="of all; may be given several times")
    add("--url", help="a server that runs, with $MMSERVE_API_KEY; otherwise one is started")
    add("--model", default=model.model, help="as for mmserve serve")
    add("--device", default=model.device, choices=("auto", "cpu", "cuda"))
    add("--assets", type=Path, metavar="FILE", help="as made by mmserve train --fetch")
    add("--json", type=Path, metavar="FILE", help="write the results there")
    add("--card", type=Path, metavar="FILE", help="write the table between the marks of this card")
    parser.set_defaults(run=evaluate)


def chosen(skills: Sequence[str] | None) -> tuple[Row, ...]:
    return tuple(row for row in ROWS if skills is None or row.skill in skills)


@contextlib.contextmanager
def server(args: argparse.Namespace) -> Iterator[str]:
    """The address of the server that was named, or of one that is started."""
    from mmserve.evaluation.served import serving

    if args.url is not None:
        yield args.url
        return
    with serving(["--model", args.model, "--device", args.device]) as own:
        yield own


def evaluate(args: argparse.Namespace) -> None:
    """All rows over the API; then, of whole runs, text and encoding in this process."""
    from mmserve.evaluation import encoding, text
    from mmserve.evaluation.client import connect
    from mmserve.evaluation.report import Report, write_card
    from mmserve.evaluation.run import SEED, run
    from mmserve.vision.train.assets import Assets
    from mmserve.vision.train.fetch import default_path

    def keep(report: Report) -> None:
        if args.json is not None:
            args.json.write_text(report.as_json() + "\n", "utf-8")

    assets = Assets(args.assets or default_path())
    with server(args) as url:
        api = connect(url, os.environ.get("MMSERVE_API_KEY", "none"))
        report = Report(api.model, SEED, ())
        for result in run(api, chosen(args.skill), args.n, assets):
            report = dataclasses.replace(report, results=(*report.results, result))
            keep(report)  # whoever stops a run that takes long has what was measured
    if args.skill is None and args.url is None:
        config = ModelConfig(model=args.model, device=args.device)
        moved = text.measure(config, min(args.n, TEXT_PROMPTS))
        time = encoding.milliseconds(config)
        report = dataclasses.replace(report, text=moved._asdict(), encode_ms=time)
        keep(report)
    print(report.table())
    if args.card is not None:
        write_card(args.card, report.table())

"""The flags of `mmserve bench`, beside the engine's.

Owns their names and help. Reads no environment; knows nothing of how anything is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from mmserve import flags
from mmserve.bench.dims import DEFAULT, SHAPE_NAMES
from mmserve.bench.family_shapes import FAMILIES
from mmserve.bench.workload import WORKLOADS


def add_bench_flags(parser: argparse.ArgumentParser, suites: Iterable[str]) -> None:
    add = parser.add_argument
    add("workload", choices=(*WORKLOADS, *suites), help="or a suite of figures")
    add("--sessions", type=flags.count, help="users (this and the next: default by workload)")
    add("--turns", type=flags.count, help="of each user")
    add("--images", type=flags.count, help="in view of a turn")
    add("--prompt-tokens", type=flags.count, help="of a turn's text")
    add("--output-tokens", type=flags.count, help="of each answer")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help="write the figures there, too")
    add("--shape", choices=SHAPE_NAMES, default=DEFAULT, help="engine, restore: model dimensions")
    add("--tokens", type=flags.count, default=32_768, help="restore: of the session's text")
    add("--case", action="append", metavar="TEXT", help="engine, drafts: cases named like it")
    add(
        "--family",
        action="append",
        choices=tuple(FAMILIES),
        help="families: these and no others (may be given several times)",
    )
    add("--budget-seconds", type=flags.count, default=300, help="of a suite: no case starts later")
    add(
        "--step-tokens",
        type=flags.count,
        default=8192,
        help="engine, restore: text tokens in one step",
    )
    add("--peer", choices=("transformers",), help="compare with its generate, in the same run")
    add(
        "--peer-dtype",
        action="append",
        choices=("float32", "bfloat16"),
        help="may be given twice (default: float32)",
    )


def add_quality_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--formats",
        type=flags.formats,
        metavar="TEXT:IMAGES,...",
        help="pairs of formats, such as auto:auto,int8:int4; the first one is compared with",
    )
    add("--shape", choices=SHAPE_NAMES, default=DEFAULT, help="model dimensions, random weights")
    add("--output-tokens", type=flags.count, default=48, help="of each answer that is compared")
    add(
        "--questions",
        type=flags.questions,
        default=1000,
        metavar="N",
        help="of easy-VQA's test: a number, 0 or all",
    )
    add("--json", type=Path, metavar="FILE", help="write the figures there, too")
    add("--plot", type=Path, metavar="PNG", help="of quality by bytes")

"""Tensor parallel on two GPUs of one host: one and two ranks, side by side.

Run: python tests/checks/two_gpus.py --out DIR [--seconds 480] [--device cuda] [--only NAME …]

mistral-7b and idefics2-8b with random weights: decoding one and 64 sequences, a prompt of 8,192
tokens, first tokens with five new and known images. Greedy tokens of both are compared: in float32,
where they have to be equal, and in bfloat16, where random weights come to near ties. Each part is a
process of its own, so that one that hangs costs its own figures only; if that was the direct sum
over GPUs' memory, the part is tried again with NCCL alone. DIR gets one JSON and log a part, and
`two_gpus.json` and `two_gpus.md` with everything.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

import torch

from mmserve.bench.ceilings import Ceilings
from mmserve.bench.dims import SHAPES, ModelShape
from mmserve.bench.engine_cases import EngineCases, Plan
from mmserve.bench.load import Load
from mmserve.bench.machine import facts
from mmserve.bench.shapes import build_shape
from mmserve.bench.sizes import Sizes, kv_bytes_per_token
from mmserve.bench.suite import Line, number, run_cases
from mmserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpecConfig
from mmserve.engine import sums
from mmserve.engine.engine import Engine
from mmserve.engine.ranks import parallel_engine
from mmserve.model.loader import LoadedModel, resolve_device
from mmserve.model.shard import Split
from mmserve.request import Segment

ROOT = Path(__file__).parents[2]
QUIET = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}  # no NVLink multicast
START_S = 90.0  # weights, compiling, capturing
TOKENS = 64  # of each greedy answer
TARGETS = {"decode 1 x 512": 1.45, "decode 64 x 1024": 1.7, "prefill 8192": 1.7}
POOL_IMAGES = 64


@dataclass(frozen=True)
class Part:
    shape: str
    ranks: int
    dtype: str = "bfloat16"
    cases: tuple[str, ...] = ()  # whose names begin so; none: greedy tokens alone
    weight: float = 60.0  # seconds, about

    @property
    def name(self) -> str:
        return f"{self.shape}-{self.dtype}-{self.ranks}"


def parts() -> list[Part]:
    """What matters most comes first. The text of both shapes is the same."""
    text, images = ("decode 1 x", "decode 64 x 1024", "prefill", "TTFT 32"), ("TTFT 5",)
    return [
        *(Part("mistral-7b", ranks, cases=text) for ranks in (1, 2)),
        *(Part("idefics2-8b", ranks, cases=images) for ranks in (1, 2)),
        *(Part("idefics2-8b", ranks, "float32") for ranks in (1, 2)),
    ]


# -- one part, in its process -------------------------------------------------------------------


def build(config: EngineConfig, split: Split, *, shape: ModelShape, direct: bool) -> LoadedModel:
    """What each rank loads."""
    if not direct:
        setattr(sums, "DIRECT_BYTES", 0)  # noqa: B010
    device = resolve_device(config.model.device)
    loaded = build_shape(shape, device, getattr(torch, config.model.dtype))
    split(loaded.lm)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return loaded


def engine_config(shape: ModelShape, part: Part, device: str, plan: Plan, lm: Any) -> EngineConfig:
    page, token = CacheConfig().page_size, kv_bytes_per_token(lm)
    image_pages = -(-shape.vision.num_tokens // page)
    tokens = plan.text_tokens() + page * plan.sessions
    return EngineConfig(
        model=ModelConfig(model=shape.name, device=device, dtype=part.dtype),
        cache=CacheConfig(
            text_bytes=tokens * token // part.ranks,
            vision_bytes=POOL_IMAGES * image_pages * page * token // part.ranks,
        ),
        scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=8192),
        speculative=SpecConfig(method=None),
        tensor_parallel_size=part.ranks,
    )


def run_part(part: Part, device: str, seconds: float, file: Path, direct: bool) -> None:
    shape, plan = SHAPES[part.shape], Plan(decode=((1, 512), (64, 1024)))
    if not part.cases:
        plan = Plan(decode=((4, 512),), prefill=512, sessions=4, energy_decode=(4, 512))
    with torch.device("meta"):
        blank = build_blank(shape, part.dtype)
    config = engine_config(shape, part, device, plan, blank.lm)
    make = partial(build, shape=shape, direct=direct)
    started = time.monotonic()
    if part.ranks > 1:
        engine = parallel_engine(config, make)
    else:
        engine = Engine(config, make(config, lambda lm: None))
    report: dict[str, Any] = dataclasses.asdict(part) | {
        "direct": direct,
        "start_s": time.monotonic() - started,
        "facts": dataclasses.asdict(facts(engine.runner.device)),
        "environment": {name: os.environ.get(name) for name in QUIET},
        "tokens": greedy(engine),
        "lines": [],
    }
    for line in measure(engine, part, plan, seconds):
        report["lines"].append(dataclasses.asdict(line))
        file.write_text(json.dumps(report))
    file.write_text(json.dumps(report))
    os._exit(0)  # figures are written; taking communicators down is another test's matter


def build_blank(shape: ModelShape, dtype: str) -> Any:
    """The model without weights, for its sizes."""
    from types import SimpleNamespace

    from transformers import AutoModelForCausalLM

    from mmserve.bench.shapes import text_config

    config = text_config(shape)
    return SimpleNamespace(lm=AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)))


def greedy(engine: Engine) -> list[list[int]]:
    """Answers to text, to images, to images that are known behind other text, and all together."""
    load = Load(engine, None, seed=7)
    first, second = load.images(2)
    asks: list[list[Segment]] = [
        [load.text(200)],
        [load.text(20), first, load.text(30)],
        [first, second, load.text(30)],
        [load.text(50), second, first, load.text(9)],
    ]
    alone = [found for ask in asks for found in answers(load, [ask])]
    return [*alone, *answers(load, asks)]


def answers(load: Load, asks: Sequence[Sequence[Segment]]) -> list[list[int]]:
    names = [load.add(ask, TOKENS) for ask in asks]
    found: dict[str, list[int]] = {name: [] for name in names}
    while load.engine.has_work:
        for name, event in load.engine.step():
            if event.error is not None:
                raise RuntimeError(event.error)
            found[name] += event.token_ids
    load.answers.clear()
    return list(found.values())


def measure(engine: Engine, part: Part, plan: Plan, seconds: float) -> Iterator[Line]:
    deadline = time.monotonic() + seconds
    load = Load(engine, None, 0, deadline)
    nothing = Sizes(1, 1, 1, 1, 1, 1)  # no bounds are shown: they are those of one GPU
    cases = EngineCases(load, nothing, Ceilings(1.0, 1.0), plan).all()
    chosen = [case for case in cases if case.name.startswith(part.cases)] if part.cases else []
    for line in run_cases(chosen, deadline):
        figures = {k: v for k, v in line.figures.items() if k not in ("TB/s", "TFLOP/s")}
        if line.unit == "TFLOP/s":
            line = dataclasses.replace(line, value=figures.pop("tokens/s"), unit="tokens/s")
        yield dataclasses.replace(line, bound=None, figures=figures)


# -- all parts ----------------------------------------------------------------------------------


@dataclass
class Runs:
    """Parts, one after another. `direct`: sums over GPUs' memory are to be tried (still)."""

    device: str
    out: Path
    direct: bool

    def run(self, part: Part, seconds: float) -> str | None:
        """What went wrong, if anything."""
        fault = self._attempt(part, seconds)
        if fault is not None and part.ranks > 1 and self.direct:
            print(f"{part.name}: {fault}; once more with NCCL alone", flush=True)
            self.direct = False
            fault = self._attempt(part, seconds)
        return fault

    def _attempt(self, part: Part, seconds: float) -> str | None:
        words = ["--part", part.name, "--device", self.device, "--seconds", str(int(seconds))]
        words += [] if self.direct else ["--no-direct"]
        command = [sys.executable, __file__, "--out", str(self.out), *words]
        log = self.out / f"{part.name}{'' if self.direct else '-nccl'}.log"
        return attempt(command, log, START_S + seconds)


def attempt(command: Sequence[str], log: Path, limit: float) -> str | None:
    with log.open("w") as said:
        try:
            status = subprocess.run(
                command,
                stdout=said,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                timeout=limit,
                env={**os.environ, **QUIET},
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"stopped after {limit:.0f} s"
    return f"ended with status {status}" if status else None


def run_all(chosen: Sequence[Part], runs: Runs, seconds: float) -> str:
    ends, faults, page = time.monotonic() + seconds, dict[str, str](), ""
    for i, part in enumerate(chosen):
        left = ends - time.monotonic()
        share = left * part.weight / sum(p.weight for p in chosen[i:])
        if left < 20:
            faults[part.name] = "not started: no time left"
        elif fault := runs.run(part, max(share - START_S / 2, 15.0)):
            faults[part.name] = fault
        print(f"{part.name}: {faults.get(part.name, 'done')}", flush=True)
        page = collect(chosen[: i + 1], runs.out, faults)
    return page


def collect(done: Sequence[Part], out: Path, faults: dict[str, str]) -> str:
    found = {
        part.name: json.loads(file.read_text())
        for part in done
        if (file := out / f"{part.name}.json").is_file()
    }
    page = [*_table(found), "", *_equal(found), *(f"{n}: {f}" for n, f in faults.items())]
    if found:
        of = next(iter(found.values()))["facts"]
        page += ["", f"Commit {of['commit']}, {of['device']}, torch {of['torch']}."]
    text = "\n".join(page) + "\n"
    (out / "two_gpus.json").write_text(json.dumps({"parts": found, "faults": faults}, indent=1))
    (out / "two_gpus.md").write_text(text)
    return text


def _table(found: dict[str, Any]) -> list[str]:
    rows = [
        "| shape | case | unit | 1 | 2 | x | wanted |",
        "| --- | --- | --- | ---: | ---: | ---: | --- |",
    ]
    for shape in SHAPES:
        pair = [found.get(Part(shape, ranks).name, {}).get("lines", []) for ranks in (1, 2)]
        one, two = ({line["case"]: line for line in lines} for lines in pair)
        for case in [*one, *(c for c in two if c not in one)]:
            lines = [side.get(case) for side in (one, two)]
            values = [line and line["value"] for line in lines]
            unit = next(line["unit"] for line in lines if line)
            ratio = None
            if values[0] and values[1]:
                ratio = values[0] / values[1] if unit == "ms" else values[1] / values[0]
            said = [line["fault"] for line in lines if line and line["fault"]]
            wanted = f">= {TARGETS[case]}" if case in TARGETS else ""
            cells = [shape, case, unit, *map(number, (*values, ratio)), "; ".join(said) or wanted]
            rows.append("| " + " | ".join(cells) + " |")
    return rows


def _equal(found: dict[str, Any]) -> list[str]:
    said = []
    for part in parts():
        pair = [found.get(dataclasses.replace(part, ranks=ranks).name) for ranks in (1, 2)]
        if part.ranks == 1 and pair[0] and pair[1]:
            answers = list(zip(pair[0]["tokens"], pair[1]["tokens"], strict=True))
            same = sum(one == two for one, two in answers)
            tokens = [a == b for one, two in answers for a, b in zip(one, two, strict=True)]
            said.append(
                f"Greedy tokens, {part.shape} in {part.dtype}: {same} of {len(answers)} answers of "
                f"{TOKENS} are equal, {100 * sum(tokens) / len(tokens):.1f} % of tokens."
            )
    return said


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [part.name for part in parts()]
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", choices=names)
    parser.add_argument("--part", choices=names, help="run this one here")
    parser.add_argument(
        "--no-direct", action="store_true", help="with --part: add up by NCCL alone"
    )
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    by_name = {part.name: part for part in parts()}
    if args.part:
        file = args.out / f"{args.part}.json"
        direct = not args.no_direct
        run_part(by_name[args.part], args.device, args.seconds, file, direct)
    chosen = [part for part in parts() if not args.only or part.name in args.only]
    runs = Runs(args.device, args.out, not args.no_direct)
    page = run_all(chosen, runs, args.seconds)
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())

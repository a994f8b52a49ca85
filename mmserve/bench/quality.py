"""`mmserve quality`: what formats of KV cost in quality, and what they save.

Owns the order of a comparison, its table and its plot. Knows nothing of how formats are held.

The first pair of formats is what the others are compared with: at each place of its own greedy
answers, how far the other pairs' next-token distributions are from its own, and how much less
likely they hold what it said. So one different token does not make all later ones different, too.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mmserve.bench.dims import ModelShape
from mmserve.bench.machine import Facts, facts
from mmserve.bench.quality_session import (
    GIB,
    Question,
    Said,
    Segments,
    Session,
    Steps,
    divergence,
    likelihood,
)
from mmserve.bench.report import table
from mmserve.bench.shapes import load_shape
from mmserve.bench.sizes import kv_bytes_per_token
from mmserve.config import MIB, CacheConfig, EngineConfig, SpecConfig
from mmserve.engine.engine import Engine
from mmserve.model.loader import LoadedModel, resolve_device
from mmserve.model.weights import Loaded, load

Pair = tuple[str, str]  # of text, of images
PAIRS: tuple[Pair, ...] = (
    ("auto", "auto"),
    ("fp8_e4m3", "fp8_e4m3"),
    ("int8", "int8"),
    ("int8", "int4"),
    ("int8", "int4_outliers"),
    ("int8", "int2_outliers"),
    ("int8", "int2"),
)
# Where weights are random little is seen of what is lost, and each pair takes its time to build.
SHAPE_PAIRS: tuple[Pair, ...] = (
    ("auto", "auto"),
    ("int8", "int8"),
    ("int8", "int4"),
    ("int8", "int2"),
    ("int4", "int4"),
    ("int2", "int2"),
)


@dataclass(frozen=True)
class Options:
    """`shape` None: the configured model with its weights; else random ones, which answer nothing
    that could be right. `questions` of easy-VQA's test: 0 for none, None for all. `steps` are timed
    of a shape, and on a GPU."""

    pairs: tuple[Pair, ...] = PAIRS
    shape: ModelShape | None = None
    steps: Steps = Steps()
    tokens: int = 48  # of an answer
    questions: int | None = 1000
    json: Path | None = None
    plot: Path | None = None
    command: str = "mmserve quality"


@dataclass(frozen=True)
class Row:
    """One pair. `nats`, `loglik`: means a token, by kind of prompt; `same`: the share of places
    where the likeliest token is the reference's; `residual_bytes`: beside the text pool, for pages
    that are not full."""

    text: str
    vision: str
    nats: dict[str, float]
    loglik: dict[str, float]
    same: float
    right: float | None
    text_tokens_per_gib: float
    residual_bytes: int
    images_per_gib: float
    tokens_per_s: float
    step_ms: float | None

    @property
    def name(self) -> str:
        return f"{self.text} / {self.vision}"


@dataclass(frozen=True)
class QualityReport:
    command: str
    model: str
    facts: Facts
    steps: Steps
    rows: tuple[Row, ...]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")


def quality(options: Options, config: EngineConfig) -> QualityReport:
    """Compare, print, and write what was asked for. Raises ValueError for what cannot be."""
    questions = [] if options.shape else _questions(options.questions)
    reference: dict[str, list[Said]] = {}
    rows: list[Row] = []
    name, found = "", facts(resolve_device(config.model.device))
    for pair in options.pairs:
        started = time.monotonic()
        engine, steps = _build(pair, options, config)
        try:
            session, name = Session(engine, options.tokens), engine.name
            rows.append(_row(pair, session, questions, reference, steps))
        finally:
            engine.close()
        del engine, session
        gc.collect()  # one model at a time
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print(f"{rows[-1].name}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
        if options.json:
            _report(options, name, found, rows).write(options.json)
    report = _report(options, name, found, rows)
    print(render(report))
    if options.plot:
        plot(report, options.plot)
    return report


def _report(options: Options, name: str, found: Facts, rows: list[Row]) -> QualityReport:
    return QualityReport(options.command, name, found, options.steps, tuple(rows))


def _build(pair: Pair, options: Options, config: EngineConfig) -> tuple[Engine, Steps | None]:
    """With the steps to be timed, if any: a public checkpoint's images have no size yet."""
    text, vision = pair
    cache = dataclasses.replace(
        config.cache,
        page_size=CacheConfig.usual_page_size(text, vision),
        text_format=text,
        vision_format=vision,
    )
    made: Loaded
    if options.shape is None:
        made = load(config.model)
    else:
        made = load_shape(options.shape, config.model, resolve_device(config.model.device), seed=0)
    steps, scheduler = None, config.scheduler
    if isinstance(made, LoadedModel) and (options.shape or made.device.type != "cpu"):
        steps = options.steps
        cache = _with_room(cache, steps, made)
        scheduler = dataclasses.replace(
            scheduler,
            max_num_seqs=max(scheduler.max_num_seqs, steps.batch),
            max_num_batched_tokens=max(scheduler.max_num_batched_tokens, steps.prefill),
        )
    config = dataclasses.replace(
        config,
        cache=cache,
        scheduler=scheduler,
        speculative=SpecConfig(method=None),
    )
    return Engine(config, made), steps


def _with_room(cache: CacheConfig, steps: Steps, made: LoadedModel) -> CacheConfig:
    """Pools that hold these steps in any format."""
    token, page = kv_bytes_per_token(made.lm), cache.page_size
    image = -(-made.spec.num_image_tokens // page) * page
    return dataclasses.replace(
        cache,
        text_bytes=max(cache.text_bytes, steps.text_tokens(page) * token),
        vision_bytes=max(cache.vision_bytes, steps.batch * steps.images * image * token),
    )


def _questions(count: int | None) -> list[Question]:
    if count == 0:
        return []
    try:
        import easy_vqa
    except ImportError as error:
        raise ValueError(
            "easy-VQA's questions are missing: pip install 'mmserve[quality]', or --questions 0"
        ) from error
    paths = easy_vqa.get_test_image_paths()
    texts, answers, images = easy_vqa.get_test_questions()
    every = [
        Question(Path(paths[image]), text, answer)
        for text, answer, image in zip(texts, answers, images, strict=True)
    ]
    return every if count is None else random.Random(11).sample(every, min(count, len(every)))


def _row(
    pair: Pair,
    session: Session,
    questions: Sequence[Question],
    reference: dict[str, list[Said]],
    steps: Steps | None,
) -> Row:
    """`reference`: filled by the first pair."""
    prompts = session.prompts()
    if not reference:
        reference.update({kind: session.answers(asked) for kind, asked in prompts.items()})
    nats, loglik, same, places = {}, {}, 0, 0
    for kind, asked in prompts.items():
        far, less = [], []
        for own, other, token in _places(session, asked, reference[kind]):
            far.append(divergence(own, other))
            less.append(likelihood(other, token) - likelihood(own, token))
            same += max(other, key=lambda t: other[t]) == token
        places += len(far)
        nats[kind], loglik[kind] = sum(far) / len(far), sum(less) / len(less)
    image_bytes = session.image_bytes()
    return Row(
        *pair,
        nats=nats,
        loglik=loglik,
        same=same / places,
        right=session.share_right(questions) if questions and image_bytes else None,
        text_tokens_per_gib=session.text_tokens_per_gib(),
        residual_bytes=session.residual_bytes(),
        images_per_gib=GIB / image_bytes if image_bytes else 0.0,
        tokens_per_s=session.tokens_per_s([p for asked in prompts.values() for p in asked]),
        step_ms=None if steps is None else session.step_ms(steps),
    )


def _places(
    session: Session, prompts: Sequence[Segments], said: Sequence[Said]
) -> Iterator[tuple[dict[int, float], dict[int, float], int]]:
    """Of every token of the reference's answers: its best ones, this session's, and itself."""
    for prompt, answer in zip(prompts, said, strict=True):
        others = session.behind(prompt, answer.tokens)
        yield from zip(answer.best, others, answer.tokens, strict=True)


HEAD = (
    "text / images", "nats a token", "log-likelihood", "same best", "easy-VQA",
    "text tokens/GiB", "residual", "images/GiB", "tokens/s", "ms a step",
)  # fmt: skip


def render(report: QualityReport) -> str:
    f, steps, cells = report.facts, report.steps, []
    for row in report.rows:
        kinds = " ".join(f"{kind} {value:.4f}" for kind, value in row.nats.items())
        less = " ".join(f"{value:+.4f}" for value in row.loglik.values())
        right = "" if row.right is None else f"{100 * row.right:.2f} %"
        cells.append(
            [row.name, kinds, less, f"{100 * row.same:.1f} %", right,
             f"{row.text_tokens_per_gib:,.0f}", f"{row.residual_bytes / MIB:,.0f} MiB",
             f"{row.images_per_gib:,.0f}", f"{row.tokens_per_s:,.0f}",
             "" if row.step_ms is None else f"{row.step_ms:.2f}"]
        )  # fmt: skip
    head = [
        f"command    {report.command}",
        f"model      {report.model}",
        f"commit     {f.commit}",
        f"device     {f.device}; Python {f.python}, torch {f.torch}, transformers {f.transformers}",
        f"a step     {steps.batch} sequences, {steps.context} text tokens behind "
        f"{steps.images} images",
    ]
    return "\n".join([*head, "", *table(HEAD, cells, left=(0, 1, 2))])


def plot(report: QualityReport, path: Path) -> None:
    """Divergence and right answers by the bytes of what is held, as a PNG. Raises ValueError."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("there is no matplotlib: pip install 'mmserve[quality]'") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    first = report.rows[0]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for row in report.rows:
        kept = 100 * first.images_per_gib / row.images_per_gib if row.images_per_gib else 100.0
        far = row.nats.get("image", row.nats["text"])
        left.plot(kept, far or math.nan, "o", label=row.name)  # 0 has no place on its axis
        right.plot(kept, math.nan if row.right is None else 100 * row.right, "o", label=row.name)
    right.legend(title="text / images")
    left.set(xlabel="bytes of an image, % of auto", ylabel="nats a token", yscale="log")
    right.set(xlabel="bytes of an image, % of auto", ylabel="easy-VQA, % right")
    figure.suptitle(report.model)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)

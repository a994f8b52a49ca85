"""`mmserve train`: one stage of a native model's training, in one command that can be called again.

Owns the order: load, let the base model write, compile, learn, keep. Knows nothing of flags.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from mmserve.config import EngineConfig, ModelConfig, SpecConfig
from mmserve.engine.engine import Engine
from mmserve.model.loader import LoadedModel, load_model
from mmserve.model.spec import load_spec, read_vision
from mmserve.model.supported import native_json
from mmserve.tokenizer import Tokenizer
from mmserve.train_drafter import writing
from mmserve.vision.model import VisionModel
from mmserve.vision.train.assets import Assets
from mmserve.vision.train.curves import draw_curves
from mmserve.vision.train.dialogue import Scribe
from mmserve.vision.train.export import description, write_model
from mmserve.vision.train.feed import Feed
from mmserve.vision.train.growth import grown
from mmserve.vision.train.learner import Learner
from mmserve.vision.train.lora import Lora
from mmserve.vision.train.probe import probe
from mmserve.vision.train.stage import Stage
from mmserve.vision.train.stream import Drawing, stream
from mmserve.vision.train.texts import TextRows, pack_texts, parted, write_texts
from mmserve.vision.train.training import Training

WRITING_SHARE = 0.25  # of a call, at most, for the base model's chats
CLOSING_S = 45.0  # of a call, for measuring and the last files
STEPS = {"max_num_seqs": 160, "max_num_batched_tokens": 256}  # while it writes


@dataclass(frozen=True)
class Options:
    """`out`: for the model; `work`: for what a later call goes on with; `minutes`: of this call;
    `workers`: processes that draw; `probed`: held-out examples of each skill that are tried at
    the end."""

    out: Path
    work: Path
    assets: Path
    minutes: float
    workers: int
    probed: int = 64


@dataclass(frozen=True)
class Start:
    """What is trained further: the base model without additions, these, and the description."""

    loaded: LoadedModel
    adapter: dict[str, Tensor]
    vision: dict[str, Tensor]
    data: dict[str, Any]


def load_start(stage: Stage, model: ModelConfig) -> Start:
    """Raises `ModelUnavailableError`, and ValueError for a model that has no LoRA."""
    spec = load_spec(stage.model)
    path = native_json(stage.model)
    if spec.lora is None or path is None:
        raise ValueError(f"{stage.model} has no LoRA to train further")
    loaded = load_model(replace(model, model=stage.model, lora=False))
    vision = {k: v for file in spec.vision_files for k, v in load_file(file).items()}
    data = json.loads(path.read_text("utf-8"))
    return Start(loaded, load_file(spec.lora.file), vision, data)


def train(stage: Stage, options: Options, config: EngineConfig) -> None:
    """Raises ValueError for options that do not fit, `ModelUnavailableError`, and DivergedError."""
    say = _Clock()
    options.work.mkdir(parents=True, exist_ok=True)
    drawn = Assets(options.assets)  # refused before anything is loaded
    texts = options.work / "texts.jsonl"
    writer = None
    if stage.text.tokens and not texts.is_file():
        part = texts.with_suffix(".part")
        deadline = say.begun + WRITING_SHARE * 60 * options.minutes
        told = (stage, config, part, deadline)
        writer = multiprocessing.get_context("spawn").Process(target=_write_part, args=told)
        writer.start()

    def chats() -> list[writing.Chat]:
        if writer is not None:
            writer.join()
            if writing.read(texts.with_suffix(".part")):  # else another call may have more time
                texts.with_suffix(".part").replace(texts)
        return writing.read(texts) if texts.is_file() else []

    train_from(load_start(stage, config.model), stage, options, drawn, chats, say)


def train_from(
    start: Start,
    stage: Stage,
    options: Options,
    assets: Assets,
    chats: Callable[[], Sequence[writing.Chat]],
    say: _Clock,
) -> dict[str, float]:
    """The part behind the loading; what was measured at the end. `chats`: of the base model, asked
    for when they are needed."""
    device, spec = start.loaded.device, start.loaded.spec
    data = description(start.data, stage)
    vision = read_vision(data["vision"])
    tokenizer = Tokenizer(start.loaded.tokenizer, ["<|im_end|>"])
    drawing = Drawing(stage, assets, Scribe(tokenizer, spec), vision.image_size)
    learner = _learner(start, VisionModel(vision), device)
    training = Training(learner, stage, device, options.work)
    if training.resume():
        say(f"going on from update {training.updates}")
    if device.type == "cuda":
        learner.compile()
        blank = Feed(repeat(drawing.shard(0)), stage.packing.shards, vision.num_tokens, device)
        training.rehearse(blank, _blank_text(stage, learner, device))
        say("compiled")
    # Drawing begins behind the compiling, which it would starve.
    first = training.taken
    shards = stream(drawing, first, options.workers, pinned=device.type == "cuda")
    say("drawing")
    written = chats()
    say(f"{len(written)} chats")
    text, held = _texts(written, stage, learner, device)
    say(f"{0 if text is None else len(text.tokens)} rows of text")
    feed = Feed(shards, stage.packing.shards, vision.num_tokens, device)

    def keep() -> None:
        training.save()
        write_model(options.out, data, learner)

    closing = min(CLOSING_S, 0.2 * 60 * options.minutes)
    training.run(feed, text, say.begun + 60 * options.minutes - closing, keep)
    size = write_model(options.out, data, learner)
    say(f"{options.out}: {size / 1e6:.2f} MB, {100 * training.progress:.0f} % of the stage")
    measured = probe(learner, drawing, held, options.probed, say.begun + 60 * options.minutes)
    (options.out / "probe.json").write_text(json.dumps(measured, indent=2) + "\n", "utf-8")
    say(json.dumps(measured))
    if training.log.stat().st_size:
        draw_curves(training.log, options.out / "curves.png")
    return measured


class _Clock:
    """Prints a line with the seconds since the beginning."""

    def __init__(self) -> None:
        self.begun = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begun:6.1f} s] {text}", flush=True)


def _write_part(stage: Stage, config: EngineConfig, file: Path, deadline: float) -> None:
    """In a process of its own, whose memory is given back when it ends."""
    model = replace(config.model, model=stage.model, lora=False)
    cache = replace(config.cache, prefix_caching=False)  # hardly anything is asked twice
    steps = replace(config.scheduler, **STEPS)
    plain = SpecConfig(method=None)
    whole = replace(config, model=model, cache=cache, scheduler=steps, speculative=plain)
    engine = Engine(whole, load_model(model))
    write_texts(engine, stage.seed, stage.text.tokens, deadline, file)
    engine.close()


def _learner(start: Start, vision: VisionModel, device: torch.device) -> Learner:
    before, after = start.loaded.spec.vision.compressor, vision.config.compressor
    vision.load_weights(grown(start.vision, before, after))
    vision.eval().to(device)  # no part of it is another when it learns
    lm: Any = start.loaded.lm
    if device.type == "cuda":
        lm.to(torch.bfloat16)
    lora = Lora(lm, start.adapter, float(start.data["lora"]["alpha"]))
    return Learner(vision, lm, lora, device)


def _blank_text(stage: Stage, learner: Learner, device: torch.device) -> TextRows | None:
    if not stage.text.tokens:
        return None
    shape = (stage.text.rows, stage.packing.tokens)
    none = torch.zeros(shape, dtype=torch.int32, device=device)
    states = torch.zeros(*shape, learner.width, dtype=torch.bfloat16, device=device)
    return TextRows(none, none.short(), none, states)


def _texts(
    chats: Sequence[writing.Chat], stage: Stage, learner: Learner, device: torch.device
) -> tuple[TextRows | None, TextRows | None]:
    """Rows to learn from and to measure, with what the base makes of them. Raises ValueError where
    there should be some."""
    if not stage.text.tokens:
        return None, None
    found = []
    for part in parted(chats):
        rows = pack_texts(part or chats, stage.packing.tokens)
        rows = TextRows(*(tensor.to(device) for tensor in rows))
        found.append(rows._replace(states=learner.base_states(rows)))
    return found[0], found[1]

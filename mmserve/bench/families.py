"""`mmserve bench families`: how fast public families decode, one after another in one process.

Owns how a family's config becomes a `LoadedCheckpoint` of random weights, made on the device, and
what is asked of each: text alone, one sequence. From there on it is the path of any checkpoint that
transformers loads. Knows nothing of flags' spelling.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from mmserve.bench.ceilings import Ceilings, Probe, measure_ceilings, usual_dtype
from mmserve.bench.engine_cases import EngineCases, Plan
from mmserve.bench.family_shapes import Words
from mmserve.bench.load import Load
from mmserve.bench.machine import facts
from mmserve.bench.shapes import EOS, SPECIAL, padded_tokenizer, seeded
from mmserve.bench.sizes import Sizes, kv_bytes_per_token
from mmserve.bench.suite import Case, Line, SuiteReport, record, render, run_cases
from mmserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpecConfig
from mmserve.engine.engine import Engine
from mmserve.model.checkpoint import Checkpoint, SamplingDefaults, declared_length
from mmserve.model.hub import Source
from mmserve.model.loader import resolve_device
from mmserve.model.weights import LoadedCheckpoint
from mmserve.vision.preprocess import fingerprint

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@dataclass(frozen=True)
class FamilySuite:
    """`families`: what their config.json say, by name. Of `plan` the first decoding and the first
    token count."""

    families: dict[str, Words]
    budget_s: float = 300.0
    json: Path | None = None
    command: str = "mmserve bench families"
    seed: int = 0
    plan: Plan = field(default_factory=lambda: Plan(decode=((1, 512),)))
    probe: Probe | None = None


def bench_families(suite: FamilySuite, config: ModelConfig) -> SuiteReport:
    """Run, print, and write the JSON."""
    deadline = time.monotonic() + suite.budget_s
    device = resolve_device(config.device)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    ceilings = measure_ceilings(device, usual_dtype(device), suite.probe)
    report = SuiteReport(
        command=suite.command,
        suite="families",
        model="transformers' families (random weights)",
        facts=facts(device),
        ceilings=ceilings,
        sizes={"families": float(len(suite.families))},
        lines=(),
    )
    report = record(report, _lines(suite, config, ceilings, deadline), suite.json)
    print(render(report))
    return report


def _lines(
    suite: FamilySuite, config: ModelConfig, ceilings: Ceilings, deadline: float
) -> Iterator[Line]:
    for name in suite.families:
        case = Case(name, partial(_family, name, suite, config, ceilings, deadline))
        yield from run_cases([case], deadline)
        gc.collect()  # the model and its engine know each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _family(
    name: str, suite: FamilySuite, config: ModelConfig, ceilings: Ceilings, deadline: float
) -> Iterator[Line]:
    device = resolve_device(config.device)
    loaded = build_family(name, suite.families[name], device, usual_dtype(device), suite.seed)
    sizes = Sizes.of(loaded)
    engine = Engine(_engine_config(config, loaded, suite.plan), loaded)
    load = Load(engine, None, suite.seed, deadline)
    cases = EngineCases(load, sizes, ceilings, suite.plan, images=False).single()
    for line in run_cases(cases, deadline):
        figures = {**line.figures, "GB of weights": sizes.weight_bytes / 1e9}
        yield dataclasses.replace(line, case=f"{name}: {line.case}", figures=figures)


def build_family(
    name: str, words: Words, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> LoadedCheckpoint:
    """The model with the weights that transformers initialises it with, in evaluation mode, as a
    checkpoint that is asked for text only. Raises ValueError for a config that is none."""
    config = AutoConfig.for_model(**words)
    text = config.get_text_config()
    text.bos_token_id, text.eos_token_id, text.pad_token_id = 1, EOS, 0
    sees = "vision_config" in words
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    with seeded(device, seed):
        lm = kind.from_config(config, dtype=dtype)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=padded_tokenizer(text.vocab_size), eos_token=SPECIAL[EOS]
    )
    checkpoint = Checkpoint(
        name=f"{name} (random weights)",
        source=Source(Path(name)),
        config=config,
        processor=tokenizer,
        chat_templates={"default": CHAT},
        takes_images=False,
        max_model_len=declared_length(text),
        rope_scaling=None,
        eos_token_ids=frozenset({EOS}),
        sampling=SamplingDefaults(),
        shards=(),
        weights_id=fingerprint(("family", repr(words).encode()), ("seed", str(seed).encode())),
    )
    return LoadedCheckpoint(lm.eval().requires_grad_(False), checkpoint, device)


def _engine_config(config: ModelConfig, loaded: LoadedCheckpoint, plan: Plan) -> EngineConfig:
    """Pools for twice the first case."""
    batch, context = plan.decode[0]
    token = kv_bytes_per_token(loaded.lm)
    tokens = 2 * batch * (context + plan.grown)
    return EngineConfig(
        model=config,
        speculative=SpecConfig(
            method=None
        ),  # or random weights would repeat themselves into drafts
        cache=CacheConfig(text_bytes=tokens * token, vision_bytes=64 * 16 * token),
        scheduler=SchedulerConfig(max_num_seqs=batch),
    )

"""`mmserve train-drafter`: from a model to a head for it, in one command.

Owns the order: write chats, see what the model makes of them, train, keep, measure. Knows nothing
of flags. What was written and trained before is found in the working folder and gone on with.
"""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmserve.config import EngineConfig, SpecConfig
from mmserve.engine.engine import Engine
from mmserve.model.loader import LoadedModel
from mmserve.model.weights import Loaded, load
from mmserve.spec.drafter import FINAL
from mmserve.spec.eagle import EagleConfig, EagleHead
from mmserve.spec.eagle_drafter import WINDOW
from mmserve.spec.head_files import narrowed, widened, write_head
from mmserve.spec.medusa import MedusaHeads
from mmserve.train_drafter import writing
from mmserve.train_drafter.corpus import Corpus
from mmserve.train_drafter.features import Collector
from mmserve.train_drafter.training import Plan, Training, acceptance
from mmserve.train_drafter.unroll import Trained, TrainedEagle, TrainedMedusa, Vocabulary

WRITING_SHARE = 0.45  # of the time; what is left of it is for the measuring
TRAINING_SHARE = 0.47  # the model's pass over the chats included
HELD_OUT = 20  # one chat of so many is not trained on


@dataclass(frozen=True)
class Options:
    """`writers`: processes that write, each with an engine; `minutes`: of all; `tokens`: of
    answers, at most; `updates`: at most; `longest`: tokens of an answer; `row`: of a chat that is
    trained on; `vocab`: tokens that the head can guess."""

    method: str  # eagle | medusa
    out: Path
    work: Path
    minutes: float = 7.0
    writers: int = 1
    tokens: int = 3_000_000
    updates: int = 100_000
    longest: int = 256
    row: int = 640
    vocab: int = 8192
    steps: int = 5
    rate: float = 1e-3
    batch_tokens: int = 16_384
    taps: tuple[int, ...] = (FINAL,)
    seed: int = 0


@dataclass(frozen=True)
class Target:
    """What is needed of the model while a head is trained. `rows` [V, hidden]: its output matrix;
    `embed` [...] int64 -> [..., hidden]."""

    name: str
    config: Any
    rows: Tensor
    embed: Callable[[Tensor], Tensor]


def train(options: Options, config: EngineConfig) -> None:
    """Raises ValueError for a model or options that do not go together."""
    begun = time.monotonic()
    seconds = 60 * options.minutes
    say = _Clock(begun)
    chats = _chats(options, config, begun + WRITING_SHARE * seconds, say)
    gc.collect()
    train_on(chats, load(config.model), options, begun, say)


def train_on(
    chats: Sequence[writing.Chat],
    loaded: Loaded,
    options: Options,
    begun: float,
    say: Any = lambda text: None,
) -> dict[str, float]:
    """The part behind the writing; what was measured at the end, by kind of chat."""
    device = loaded.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    taps = options.taps if options.method == "eagle" else (FINAL,)
    collector = Collector(loaded, taps, dtype, options.row)
    kept, held = _split(chats)
    if not kept:
        raise ValueError(f"{len(chats)} chats are too few to train on")
    say(f"the model reads {len(kept)} chats")
    corpus = collector.collect(kept)
    lm: Any = loaded.lm
    target = Target(
        loaded.name,
        lm.config.get_text_config(),
        lm.get_output_embeddings().weight.detach(),
        lm.get_input_embeddings(),
    )
    vocabulary = _vocabulary(corpus, target, options)
    share = (vocabulary.number[corpus.tokens[corpus.answers]] >= 0).float().mean().item()
    say(f"{len(corpus.tokens)} tokens; {len(vocabulary.ids)} can be guessed: {100 * share:.1f} %")
    torch.manual_seed(options.seed)
    module, trained = _head(corpus, target, options)
    module.to(device)
    left = begun + (WRITING_SHARE + TRAINING_SHARE) * 60 * options.minutes - time.monotonic()
    plan = Plan(
        options.steps,
        options.rate,
        options.batch_tokens,
        max(left, 1.0),
        options.updates,
        options.seed,
    )
    name = "_".join([options.method, *map(str, taps)])
    state = options.work / f"{name}.pt"
    training = Training(module, trained, corpus, vocabulary, plan, state)
    if training.resume():
        say(f"going on from update {training.updates}")
    training.run(lambda: _write(module, vocabulary, target, options), say)
    module.load_state_dict(widened(narrowed(module.state_dict())))  # as it will be read
    found = {}
    for kind, part in _by_kind(held):
        found[kind] = acceptance(trained, collector.collect(part), vocabulary, plan)
        say(f"{kind}: {found[kind]:.3f} tokens a step, on {len(part)} chats held out")
    size = sum(file.stat().st_size for file in options.out.iterdir())
    say(f"{options.out}: {size / 1e6:.2f} MB")
    return found


class _Clock:
    """Prints a line with the seconds since the beginning."""

    def __init__(self, begun: float) -> None:
        self._begun = begun

    def __call__(self, text: str) -> None:
        print(f"[{time.monotonic() - self._begun:6.1f} s] {text}", flush=True)


def _chats(
    options: Options, config: EngineConfig, deadline: float, say: _Clock
) -> list[writing.Chat]:
    """Those of the working folder, or new ones."""
    file = options.work / "chats.jsonl"
    if file.is_file():
        chats = writing.read(file)
        say(f"{len(chats)} chats found in {file}")
        return chats
    parts = [options.work / f"chats-{number}.jsonl" for number in range(options.writers)]
    options.work.mkdir(parents=True, exist_ok=True)
    if options.writers == 1:
        _write_part(options, config, 0, parts[0], deadline, say)
    else:
        spawning = multiprocessing.get_context("spawn")
        writers = []
        for number, part in enumerate(parts):
            told = (options, config, number, part, deadline, say)
            writers.append(spawning.Process(target=_write_part, args=told))
            writers[-1].start()
        for writer in writers:
            writer.join()
            if writer.exitcode:  # the others' texts, and its own so far, are as good without
                say(f"a writer ended with status {writer.exitcode}")
    chats = [chat for part in parts if part.is_file() for chat in writing.read(part)]
    writing.save(chats, file)
    return chats


def _write_part(
    options: Options,
    config: EngineConfig,
    number: int,
    file: Path,
    deadline: float,
    say: _Clock,
) -> None:
    """What one of the writers writes, chat by chat."""
    loaded = load(config.model)
    # Hardly anything is asked twice, and what is kept of what was asked has to be searched.
    cache = dataclasses.replace(config.cache, prefix_caching=False)
    plain = SpecConfig(method=None)
    engine = Engine(dataclasses.replace(config, cache=cache, speculative=plain), loaded)
    native = isinstance(loaded, LoadedModel)
    writer = writing.Writer(engine, options.seed + 1000 * number, options.longest, images=native)
    count = tokens = 0
    told = time.monotonic()
    with file.open("w", encoding="utf-8") as out:
        for chat in writer.write(options.tokens // options.writers, deadline):
            out.write(chat.as_json() + "\n")
            count, tokens = count + 1, tokens + len(chat.answer)
            if time.monotonic() - told > 10:
                told = time.monotonic()
                say(f"writer {number}: {count} chats, {tokens} tokens of answers")
    engine.close()
    say(f"writer {number}: {count} chats, {tokens} tokens of answers")


def _vocabulary(corpus: Corpus, target: Target, options: Options) -> Vocabulary:
    """The most frequent tokens of the answers, by number; Medusa's heads guess all of them."""
    size = len(target.rows)
    counts = torch.bincount(corpus.tokens[corpus.answers], minlength=size)
    if options.method == "medusa" or options.vocab >= size:
        ids = torch.arange(size, device=counts.device)
    else:
        ids = counts.argsort(descending=True, stable=True)[: options.vocab].sort().values
    number = torch.full((size,), -1, device=ids.device)
    number[ids] = torch.arange(len(ids), device=ids.device)
    return Vocabulary(target.rows[ids], ids, number)


def _head(corpus: Corpus, target: Target, options: Options) -> tuple[torch.nn.Module, Trained]:
    c = target.config
    if options.method == "medusa":
        heads = MedusaHeads(c.hidden_size, options.steps, 1)
        return heads, TrainedMedusa(heads)
    rope = getattr(c, "rope_parameters", None) or {}
    head = EagleHead(
        EagleConfig(
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_heads=c.num_attention_heads,
            num_kv_heads=c.num_key_value_heads,
            head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
            rope_theta=float(rope.get("rope_theta", 10_000.0)),
            eps=float(getattr(c, "rms_norm_eps", 1e-6)),
            taps=options.taps,
            third=True,
            draft_vocab=options.vocab,
        )
    )
    _begin(head, corpus)
    return head, TrainedEagle(head, target.embed, WINDOW)


@torch.no_grad()
def _begin(head: EagleHead, corpus: Corpus) -> None:
    """Where it starts: what it guesses first is the state that it was given, as loud as those are
    that the output matrix is used to."""
    for name, parameter in head.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.mul_(0.1)
    width = head.config.hidden_size
    head.fc.weight.zero_()  # inner layers' states can be far louder than the last one's
    head.fc.weight[:, -width:] = torch.eye(width)
    some = corpus.finals[:100_000].float()
    head.norm.weight.fill_(some.square().mean().sqrt().item())


def _write(
    module: torch.nn.Module, vocabulary: Vocabulary, target: Target, options: Options
) -> None:
    if isinstance(module, MedusaHeads):
        config: dict[str, Any] = {
            "architectures": ["MedusaModel"],
            "medusa_num_heads": options.steps,
            "medusa_num_layers": 1,
        }
        tensors = module.saved()
    else:
        assert isinstance(module, EagleHead)
        config, tensors = module.config.as_json(), dict(module.state_dict())
        ids = vocabulary.ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = vocabulary.number.cpu() >= 0
    write_head(options.out, {**config, "target": target.name}, narrowed(tensors))


def _split(chats: Sequence[writing.Chat]) -> tuple[list[writing.Chat], list[writing.Chat]]:
    """What is trained on, and what is held out: as many of either kind."""
    held = [chat for _, part in _by_kind(chats) for chat in part[::HELD_OUT]]
    out = set(map(id, held))
    return [chat for chat in chats if id(chat) not in out], held


def _by_kind(chats: Sequence[writing.Chat]) -> Iterator[tuple[str, list[writing.Chat]]]:
    for kind in ("text", "image"):
        if part := [chat for chat in chats if chat.kind == kind]:
            yield kind, part

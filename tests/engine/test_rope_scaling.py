"""Sequences beyond the trained length: scaled as their checkpoint declares it, or on demand.

All models here were trained for 64 positions. Those that declare scaling are held to transformers'
`generate`; those that are scaled on demand to a checkpoint that declares the same, and, within the
trained length, to a server that knows nothing of scaling, to the last bit.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mmserve.engine.engine import Engine
from mmserve.model import rope
from mmserve.model.weights import load
from mmserve.request import SamplingParams, Segment, TextSegment
from tests.engine.driver import Driver, picture
from tests.engine.driver import words as tiny_words
from tests.engine.tiny import END, tiny_config, tiny_model
from tests.model import families
from tests.model.border import message, open_border
from tests.model.dense import dense_logits, embed

TRAINED = 64
YARN = {"rope_type": "yarn", "factor": 4.0}
# Prompt and output: within the trained length, up to it, across it (thrice), and beyond it.
LENGTHS = ((10, 40), (40, 24), (40, 25), (50, 64), (64, 64), (100, 64))


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scaled")


def declare(parent: Path, name: str, **parameters: Any) -> Path:
    """The family's weights in a checkpoint that was trained for 64 positions, and says this of
    rotary embedding."""
    source = families.build(name, parent)
    folder = parent / f"{name}-{'-'.join(map(str, parameters.values()))[:40] or 'plain'}"
    if not folder.exists():
        shutil.copytree(source, folder)
        config = json.loads((folder / "config.json").read_text())
        text = config.get("text_config", config)
        text["max_position_embeddings"] = TRAINED
        text["rope_parameters"] |= parameters
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def declared(parent: Path, name: str) -> Path:
    if name == "llama_longrope":  # of a class that keeps the keys made with short factors
        parameters = {
            "rope_type": "longrope",
            "factor": 4.0,
            "original_max_position_embeddings": TRAINED,
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [1.0 + 0.5 * i for i in range(8)],
        }
        folder = declare(parent, "llama_gqa", **parameters)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
        return folder
    return families.build(name, parent)


def driver(folder: Path, scaling: dict[str, Any] | None = None, **scheduler: int) -> Driver:
    model = ModelConfig(model=str(folder), device="cpu", rope_scaling=scaling)
    cache = CacheConfig(text_bytes=1 << 24, vision_bytes=1 << 24)
    return Driver(Engine(EngineConfig(model, cache, SchedulerConfig(**scheduler)), load(model)))


def tokens(seed: int, count: int) -> list[int]:
    """Random ids of letters."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(20, 90, (count,), generator=random).tolist()


def submit(d: Driver, prompt: Sequence[int], steps: int) -> str:
    params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True)
    return d.submit((TextSegment(tuple(prompt)),), params)


def ask(d: Driver, prompt: Sequence[int], steps: int) -> tuple[list[int], Tensor]:
    """The tokens and the logits they were chosen from."""
    request = submit(d, prompt, steps)
    d.run()
    return d.tokens(request), torch.stack(d.logits[request])


def generate(folder: Path, prompt: Sequence[int], steps: int) -> families.Answer:
    model, _ = families.load(folder)
    ids = torch.tensor([list(prompt)])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return families.answer(model, inputs, steps)


def same(d: Driver, request: str, wanted: families.Answer) -> bool:
    logits = torch.stack(d.logits[request])
    return d.tokens(request) == wanted.ids and float((logits - wanted.logits).abs().max()) < 1e-3


def cached(d: Driver, request: str) -> int:
    usage = d.last(request).usage
    assert usage is not None
    return usage.cached_tokens


# -- as declared -----------------------------------------------------------------------------------

DECLARED = ("llama_dynamic", "phi3", "llama_longrope", "llama_yarn", "llama_linear", "llama_llama3")


@pytest.mark.parametrize("budget", [512, 7])
@pytest.mark.parametrize("name", DECLARED)
def test_declared_scaling_gives_transformers_tokens_alone_and_in_a_batch(
    name: str, budget: int, parent: Path
) -> None:
    folder = declared(parent, name)
    d = driver(folder, max_num_batched_tokens=budget)
    wanted = [generate(folder, tokens(n, n), steps) for n, steps in LENGTHS]
    for (n, steps), answer in zip(LENGTHS, wanted, strict=True):
        request = submit(d, tokens(n, n), steps)
        d.run()
        assert same(d, request, answer), (n, steps, answer.lead())
    requests = [submit(d, tokens(n, n), steps) for n, steps in LENGTHS]
    d.run()
    for case, request, answer in zip(LENGTHS, requests, wanted, strict=True):
        assert same(d, request, answer), (case, answer.lead())
    d.assert_idle()


@pytest.mark.parametrize("name", ["llama_dynamic", "phi3", "llama_longrope"])
def test_a_prefix_made_under_other_angles_is_not_read(name: str, parent: Path) -> None:
    folder = declared(parent, name)
    d = driver(folder)
    first = submit(d, tokens(1, 60), 3)
    d.run()
    longer = [*tokens(1, 60), *tokens(2, 20)]
    once, again = (submit(d, longer, 8) for _ in range(2))
    d.run()
    assert cached(d, first) == cached(d, once) == 0
    assert all(same(d, request, generate(folder, longer, 8)) for request in (once, again))
    third = submit(d, longer, 8)
    d.run()
    assert cached(d, third) == 64
    within = submit(d, [*tokens(1, 48), *tokens(3, 10)], 3)
    d.run()
    assert cached(d, within) == 48


# -- on demand -------------------------------------------------------------------------------------


def test_a_sequence_within_the_trained_length_has_the_bits_of_a_server_without(
    parent: Path,
) -> None:
    folder = declare(parent, "llama_gqa")
    plain, scaling = driver(folder), driver(folder, YARN)
    assert (plain.engine.max_model_len, scaling.engine.max_model_len) == (64, 256)
    ask(scaling, tokens(9, 100), 4)
    for n, steps in ((10, 40), (40, 24), (63, 1)):
        wanted, got = (ask(d, tokens(n, n), steps) for d in (plain, scaling))
        assert wanted[0] == got[0] and torch.equal(wanted[1], got[1])


@pytest.mark.parametrize("kind", ["yarn", "linear", "longrope"])
def test_a_sequence_beyond_has_the_tokens_of_a_checkpoint_that_declares_it(
    kind: str, parent: Path
) -> None:
    more = {"long_factor": [1.0 + 0.5 * i for i in range(8)]} if kind == "longrope" else {}
    scaling = {"rope_type": kind, "factor": 4.0, **more}
    folder = declare(parent, "llama_gqa")
    parameters = rope.asked(scaling, TRAINED)
    if kind == "longrope":
        parameters["short_factor"] = parameters["long_factor"]
    whole = declare(parent, "llama_gqa", **parameters)
    d = driver(folder, scaling)
    beyond = submit(d, tokens(1, 100), 64)
    crossing = submit(d, tokens(2, 50), 64)
    within = submit(d, tokens(3, 20), 40)
    d.run()
    assert same(d, beyond, generate(whole, tokens(1, 100), 64))
    assert same(d, within, generate(folder, tokens(3, 20), 40))
    said, logits = d.tokens(crossing), torch.stack(d.logits[crossing])
    before = generate(folder, tokens(2, 50), 15)
    after = generate(whole, [*tokens(2, 50), *said[:15]], 49)
    assert said == [*before.ids, *after.ids]
    assert float((logits - torch.cat((before.logits, after.logits))).abs().max()) < 1e-3
    assert d.engine.metrics.num_preemptions._value.get() == 0, "growing is no preemption"
    d.assert_idle()


def test_dynamic_on_demand_is_computed_anew_at_each_doubling(parent: Path) -> None:
    folder = declare(parent, "llama_gqa")
    d = driver(folder, {"rope_type": "dynamic", "factor": 4.0})

    def stretched(longest: int) -> Path:
        base = 10000.0 * (4.0 * longest / TRAINED - 3.0) ** (16 / 14)
        return declare(parent, "llama_gqa", rope_theta=base)

    said, logits = ask(d, tokens(1, 60), 84)
    parts = [generate(folder, tokens(1, 60), 5)]
    for longest, start, steps in ((128, 5, 64), (256, 69, 15)):
        prompt = [*tokens(1, 60), *said[:start]]
        parts.append(generate(stretched(longest), prompt, steps))
    assert said == [token for part in parts for token in part.ids]
    assert float((logits - torch.cat([part.logits for part in parts])).abs().max()) < 1e-3
    # Prompts of one doubling share their prefix, whatever their lengths.
    reader = submit(d, [*tokens(1, 60), *said[:30]], 4)
    d.run()
    assert cached(d, reader) == 80


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava"])
def test_images_in_their_context_are_scaled_with_it(name: str, parent: Path) -> None:
    parameters = rope.asked(YARN, TRAINED)
    folder, whole = declare(parent, name), declare(parent, name, **parameters)
    parts = ("Look: ", families.picture(3), " and then say at length what it is you see. " * 2)
    steps = 24
    model, _ = families.load(whole)
    wanted = families.answer(model, open_border(whole).encode(*parts), steps)
    assert len(wanted.prompt) > TRAINED
    d = driver(folder, YARN)
    params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True)

    def send(*parts: Any) -> str:
        files = [p.data for p in message("user", *parts).parts if hasattr(p, "data")]
        images = [d.engine.pipeline.prepare(f) for f in files]
        prompt = d.engine.template.render([message("user", *parts)], images)
        request = d.submit(prompt.segments, params)
        d.run()
        return request

    send(*parts[:2])  # leaves the image there, under unscaled angles
    assert all(same(d, send(*parts), wanted) for _ in range(2))
    d.assert_idle()


# -- the native composition, whose images are stored at local positions ----------------------------


def tiny(scaling: dict[str, Any], dtype: str = "float32") -> Driver:
    asked = rope.asked(scaling, TRAINED)
    loaded = dataclasses.replace(tiny_model(rope.reach(asked)), rope_scaling=asked)
    return Driver(Engine(tiny_config(dtype=dtype), loaded))


def dense(segments: Sequence[Segment], said: Sequence[int], scaling: dict[str, Any]) -> Tensor:
    """The logits that these tokens were to be chosen from, one whole pass for each."""
    plain = tiny_model()
    scaled = dataclasses.replace(plain, lm=copy.deepcopy(plain.lm))
    lm: Any = scaled.lm
    config = rope.scaled_config(lm.config, rope.asked(scaling, TRAINED))
    lm.model.rotary_emb = type(lm.model.rotary_emb)(config)
    embeddings, image_of = embed(plain, segments)
    rows = []
    for token in said:
        model = plain if len(image_of) <= TRAINED else scaled
        with torch.no_grad():
            rows.append(dense_logits(model, embeddings, image_of)[-1])
        new: Tensor = lm.get_input_embeddings()(torch.tensor([token]))
        embeddings, image_of = torch.cat((embeddings, new)), [*image_of, 0]
    return torch.stack(rows)


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_native_images_are_read_under_the_angles_of_their_readers(kind: str) -> None:
    scaling = {"rope_type": kind, "factor": 4.0}
    d = tiny(scaling)
    a, b = (d.image(picture(seed)) for seed in (1, 2))
    prompts = (
        (tiny_words(1, 8), a, tiny_words(2, 6)),  # 34 positions
        (tiny_words(1, 8), a, tiny_words(3, 26)),  # 54
        (tiny_words(4, 8), a, tiny_words(5, 9), b, tiny_words(6, 12)),  # 69
    )
    params = SamplingParams(max_tokens=24, temperature=0.0, logit_bias={END: -100.0})
    requests = [d.submit(prompt, params) for prompt in prompts]
    d.run()
    for prompt, request in zip(prompts, requests, strict=True):
        wanted = dense(prompt, d.tokens(request), scaling)
        logits = torch.stack(d.logits[request])
        assert len(logits) == 24
        assert float((logits - wanted).abs().max()) < 2e-4
    d.assert_idle()


def test_a_native_image_is_computed_once_for_each_kind_of_angles() -> None:
    d = tiny(YARN)
    a = d.image(picture(1))
    d.ask(tiny_words(1, 8), a, tiny_words(2, 6))
    assert d.counts()[2] == 1
    beyond = (tiny_words(1, 8), a, tiny_words(2, 50))
    d.ask(*beyond)
    assert d.counts()[2] == 2
    d.ask(tiny_words(9, 70), a, tiny_words(2, 6))
    d.ask(tiny_words(8, 7), a, tiny_words(3, 6))
    assert d.counts()[2] == 2
    assert d.counts()[0] == 1, "what the encoder sees has no angles"


def test_in_eight_bits_growing_beyond_is_as_if_it_had_been_longer_from_the_start() -> None:
    params = SamplingParams(max_tokens=30, temperature=0.0, logit_bias={END: -100.0})
    d, fresh = tiny(YARN, "int8"), tiny(YARN, "int8")
    prompt = (tiny_words(1, 8), d.image(picture(1)), tiny_words(2, 26))  # 54 positions
    request = d.submit(prompt, params)
    d.run()
    said = d.tokens(request)
    after = fresh.submit((*prompt, TextSegment(tuple(said[:11]))), params)
    fresh.run()
    assert said[11:] == fresh.tokens(after)[:19]
    assert torch.equal(torch.stack(d.logits[request][11:]), torch.stack(fresh.logits[after][:19]))
    unscaled = Driver(Engine(tiny_config(dtype="int8"), tiny_model()))
    known = unscaled.submit(prompt, params)
    unscaled.run()
    same, other = (d.logits[request][i].equal(unscaled.logits[known][i]) for i in (10, 11))
    assert same and not other

"""Public checkpoints give transformers' own tokens: every family, whole, cut, cached, crowded.

Tiny random checkpoints (tests.model.families) are saved as folders and loaded as a user's would be;
the answers they are held to are those of transformers' `generate`, in float32 on the CPU.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from mmserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mmserve.engine.engine import Engine
from mmserve.model.weights import load
from mmserve.request import BeamParams, SamplingParams, Segment
from tests.engine.driver import Driver
from tests.engine.test_drafting import Guesses, assist
from tests.model import families
from tests.model.border import Border, message, open_border

STEPS = 64
GREEDY = SamplingParams(max_tokens=STEPS, temperature=0.0)
BRIEF = 24  # tokens, where the rest would show nothing new
BEAM_STEPS = 12
WINDOW = 24  # of the families that have one
LONG = "The quick brown fox jumps over the lazy dog and back. " * 6  # over four windows

Parts = tuple[Any, ...]

TEXTS: dict[str, Parts] = {
    "text": ("What is this and what is that?",),
    "long": (LONG,),
}
PICTURES: dict[str, Parts] = {
    "one": ("What is this?", families.picture(3), " Say it."),
    "first": (families.picture(4, 70, 42), "What do you see?"),
    "last": ("Look at this, please:", families.picture(5)),
    "three": (
        *("Compare", families.picture(3), "with", families.picture(6, 42, 60)),
        *(families.picture(7, 84, 42), LONG),
    ),
}


@dataclass(frozen=True, eq=False)
class Family:
    """One checkpoint: what transformers answers, and engines that serve it."""

    name: str
    folder: Path
    border: Border

    @property
    def cases(self) -> dict[str, Parts]:
        return TEXTS | (PICTURES if self.name in families.VISION else {})

    def answer(self, case: str) -> families.Answer:
        return _answer(self, case)

    def engine(self, *, text_pages: int = 400, **scheduler: int) -> Engine:
        model = ModelConfig(model=str(self.folder), device="cpu")
        probe = Engine(EngineConfig(model=model), load(model)) if text_pages < 400 else None
        page = sum(p.shape.page_bytes for p in probe.runner.text) if probe else 1 << 16
        cache = CacheConfig(text_bytes=text_pages * page, vision_bytes=1 << 24)
        return Engine(EngineConfig(model, cache, SchedulerConfig(**scheduler)), load(model))

    def driver(self, **options: int) -> Driver:
        return Driver(self.engine(**options))

    def segments(self, driver: Driver, case: str) -> tuple[Segment, ...]:
        """The case as a user's message, by the engine's own pipeline and template."""
        parts = self.cases[case]
        files = [p.data for p in message("user", *parts).parts if hasattr(p, "data")]
        images = [driver.engine.pipeline.prepare(f, alone=len(files) == 1) for f in files]
        return driver.engine.template.render([message("user", *parts)], images).segments

    def check(self, driver: Driver, request: str, case: str, steps: int = STEPS) -> None:
        """A finished request's tokens and logits are transformers'."""
        wanted, got = self.answer(case), driver.tokens(request)
        # transformers goes on where the declared context ends.
        room = driver.engine.max_model_len - len(wanted.prompt)
        count = min(steps, room)
        assert got == wanted.ids[:count], f"{self.name}/{case}: lead {wanted.lead():.1e}"
        logits = torch.stack(driver.logits[request])
        assert float((logits - wanted.logits[:count]).abs().max()) < 1e-3, case


@cache
def _answer(family: Family, case: str) -> families.Answer:
    model, _ = families.load(family.folder)
    if family.name == "mllama":
        _as_trained(model)
    answer = families.answer(model, family.border.encode(*family.cases[case]), STEPS)
    assert len(set(answer.ids)) > 8, "a model that repeats itself tells little"
    return answer


def _as_trained(model: Any) -> None:
    """Text before the first image gets nothing from cross attention, as in Meta's own code.

    In transformers its attention reads every image of the prompt unmasked, padding too, and only
    the MLP behind is kept out. A text's KV would then depend on images that come after it.
    """
    for layer in model.model.language_model.layers:
        if hasattr(layer, "cross_attn"):
            seen: list[Any] = []

            def note(_: Any, __: Any, kwargs: dict[str, Any], seen: list[Any] = seen) -> None:
                seen[:] = [kwargs["full_text_row_masked_out_mask"]]

            def mask(_: Any, __: Any, out: Any, seen: list[Any] = seen) -> Any:
                return out if seen[0] is None else (out[0] * seen[0][:, 0], *out[1:])

            layer.register_forward_pre_hook(note, with_kwargs=True)
            layer.cross_attn.register_forward_hook(mask)


@pytest.fixture(scope="module", params=[*families.VISION, *families.TEXT])
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Family]:
    name: str = request.param
    folder = families.build(name, tmp_path_factory.getbasetemp() / "families")
    yield Family(name, folder, open_border(folder))
    _answer.cache_clear()
    gc.collect()  # drivers and their engines refer to one another, and pools are large


def test_alone_cached_and_again_in_a_crowd(family: Family) -> None:
    driver = family.driver(max_num_batched_tokens=64)
    for case in family.cases:
        request = driver.submit(family.segments(driver, case), GREEDY)
        driver.run()
        family.check(driver, request, case)
    # Once more, all together; now the prefix cache and the vision pool know them.
    requests = {c: driver.submit(family.segments(driver, c), GREEDY) for c in family.cases}
    driver.run()
    for case, request in requests.items():
        family.check(driver, request, case)
        usage = driver.last(request).usage
        assert usage is not None
        if not driver.engine.runner.sight.whole_prompt:  # what a window has passed is gone there
            assert usage.cached_tokens > 0 and usage.vision_misses == 0
    driver.assert_idle()


def test_chunks_end_inside_texts_and_around_images(family: Family) -> None:
    driver = family.driver(max_num_batched_tokens=5)
    brief = replace(GREEDY, max_tokens=BRIEF)
    requests = {c: driver.submit(family.segments(driver, c), brief) for c in family.cases}
    driver.run()
    for case, request in requests.items():
        family.check(driver, request, case, BRIEF)
    driver.assert_idle()


def test_preempted_sequences_go_on_as_if_nothing_had_been(family: Family) -> None:
    driver = family.driver(text_pages=22, max_num_batched_tokens=128)
    cases = ["text"] * 12 + [case for case in family.cases if case in ("long", "one")]
    requests = [(c, driver.submit(family.segments(driver, c), GREEDY)) for c in cases]
    driver.run()
    for case, request in requests:
        family.check(driver, request, case)
    assert driver.engine.metrics.num_preemptions._value.get() > 0
    driver.assert_idle()


def test_trees_of_guesses_change_nothing(family: Family) -> None:
    """Positions of several axes, windows, capped scores and images in context, or beside it."""
    driver = family.driver(max_num_batched_tokens=64)
    brief = replace(GREEDY, max_tokens=BRIEF)
    wanted = {str(n): family.answer(case).ids[:BRIEF] for n, case in enumerate(family.cases)}
    guesser = assist(driver, wanted, Guesses(0.8, 6, branches=2))
    for case in family.cases:
        driver.submit(family.segments(driver, case), brief)
    driver.run()
    assert {request: driver.tokens(request) for request in wanted} == wanted
    assert guesser.right > BRIEF // 2
    driver.assert_idle()


def test_beams_are_transformers_beams(family: Family) -> None:
    """With an image in the prompt and without; beside others, and with a small pool, too."""
    driver = family.driver(text_pages=30, max_num_batched_tokens=64)
    model, _ = families.load(family.folder)
    if family.name == "mllama":
        _as_trained(model)
    cases = [case for case in family.cases if case in ("long", "one")]
    beams = BeamParams(4, 4)
    params = replace(GREEDY, max_tokens=BEAM_STEPS, beams=beams)
    requests = {c: driver.submit(family.segments(driver, c), params) for c in cases}
    driver.run()
    driver.assert_idle()
    for case, request in requests.items():
        inputs = family.border.encode(*family.cases[case])
        with torch.no_grad():
            out = model.generate(
                **inputs,
                max_new_tokens=BEAM_STEPS,
                num_beams=beams.width,
                num_return_sequences=beams.count,
                do_sample=False,
            )
        wanted = out[:, inputs["input_ids"].shape[1] :].tolist()
        assert [list(c.token_ids) for c in driver.last(request).choices] == wanted, case

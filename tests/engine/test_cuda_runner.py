"""The GPU runner computes the same model: captured on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import tests.kernels.interpreter  # noqa: F401
from mmserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mmserve.engine import cuda_runner, dense_chunks
from mmserve.engine import engine as engine_module
from mmserve.engine.cuda_runner import CUDARunner
from mmserve.engine.engine import Engine
from mmserve.engine.graphs import Graphs
from mmserve.engine.model_runner import ModelRunner
from mmserve.model import cuda_step
from mmserve.model.cuda_install import KINDS
from mmserve.model.cuda_layer import CUDALayer
from mmserve.model.cuda_prelude import CUDARope
from mmserve.model.weights import load
from mmserve.request import BeamParams, SamplingParams, Segment, Streaming, TextSegment
from tests.engine.driver import Driver, picture, words
from tests.engine.test_families import Family
from tests.engine.tiny import tiny_config, tiny_model
from tests.model import families
from tests.model.border import open_border
from tests.model.dense import dense_logits, embed
from tests.model.family_text import BODY, TEXT, Recipe, gemma_tokens, phi, phi3
from tests.model.family_text import ids as ids_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BRIEF = SamplingParams(max_tokens=3, temperature=0.0)


def on_the_gpus_runner(loaded: Any, config: EngineConfig) -> CUDARunner:
    return CUDARunner(loaded, config.cache, config.model, config.scheduler)


@pytest.fixture(params=["fused", "as transformers has it"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr(engine_module, "build_runner", on_the_gpus_runner)
    if request.param != "fused":
        monkeypatch.setattr(CUDALayer, "fits", lambda layer: False)
    return make_driver()


def make_driver(*, budget: int = 40, **options: Any) -> Driver:
    """`options`: of the model."""
    config = tiny_config(max_num_batched_tokens=budget)
    config = replace(config, model=replace(config.model, **options))
    return Driver(Engine(config, tiny_model(device=DEVICE)))


def mixes(driver: Driver) -> list[tuple[Segment, ...]]:
    """Text and images first, last and between; two conversations over one image."""
    a, b = (driver.image(picture(n)) for n in (1, 2))
    return [
        (words(1, 5),),
        (a, words(2, 20), b, words(3, 1)),
        (words(4, 18), a, words(5, 7)),
        (words(6, 30), b, a, words(7, 9), a, words(8, 2)),
    ]


def test_logits_are_the_dense_models(driver: Driver) -> None:
    dense: Any = tiny_model()
    asked = mixes(driver)
    ids = [driver.submit(segments, BRIEF) for segments in asked]
    driver.run()
    for request, segments in zip(ids, asked, strict=True):
        tokens = driver.tokens(request)
        whole = (*segments, TextSegment(tuple(tokens[:-1])))
        expected = dense_logits(dense, *embed(dense, whole))[-len(tokens) :]
        got = torch.stack(driver.logits[request]).cpu()[: len(tokens)]
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_a_known_image_is_not_computed_again(driver: Driver) -> None:
    first = driver.submit((driver.image(picture(3)), words(1, 4)), replace(BRIEF, max_tokens=2))
    driver.run()
    runs = driver.engine.metrics.vision_encoder_runs.collect()
    again = driver.submit((driver.image(picture(3)), words(1, 4)), replace(BRIEF, max_tokens=2))
    driver.run()
    assert driver.engine.metrics.vision_encoder_runs.collect() == runs
    assert driver.tokens(first) == driver.tokens(again)


def test_an_answer_goes_on_beyond_its_window_and_behind_a_marked_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Launched ahead, and as the plain runner does it."""
    answers = []
    for build in (on_the_plain_runner, on_the_gpus_runner):
        monkeypatch.setattr(engine_module, "build_runner", build)
        driver = make_driver(budget=70)
        prompt = (words(1, 4), driver.image(picture(1)), words(2, 14), driver.image(picture(2)))
        params = replace(BRIEF, max_tokens=5, ignore_eos=True)
        cut = driver.submit((*prompt, words(3, 2)), params, streaming=Streaming(22, 4, 6))
        driver.run()
        marked = (prompt[0], replace(prompt[1], marked=True), *prompt[2:], words(3, 3))
        behind = driver.submit(marked, replace(BRIEF, max_tokens=2))
        driver.run()
        first, second = (driver.last(request).usage for request in (cut, behind))
        assert first is not None and first.dropped_tokens > 0
        assert second is not None and second.vision_hits == 1
        answers.append((driver.tokens(cut), driver.tokens(behind), first, second))
    assert answers[0] == answers[1]


def test_an_image_may_be_computed_in_its_context_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its head is; its tail is read from where it stands by itself."""
    monkeypatch.setattr(CUDALayer, "fits", lambda layer: False)
    answers = []
    for build in (on_the_plain_runner, on_the_gpus_runner):
        monkeypatch.setattr(engine_module, "build_runner", build)
        driver = make_driver(vision_mode="blend", blend_tokens=16)
        ids = [driver.submit(segments, BRIEF) for segments in mixes(driver)[1:3]]
        driver.run()
        answers.append([torch.stack(driver.logits[i]).cpu() for i in ids])
    for expected, logits in zip(*answers, strict=True):
        torch.testing.assert_close(logits[: len(expected)], expected, rtol=1e-3, atol=1e-3)


def test_deterministic_is_refused_where_images_see_their_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "build_runner", on_the_gpus_runner)
    with pytest.raises(ValueError, match="by themselves"):
        make_driver(deterministic=True, vision_mode="prefix")


def on_the_plain_runner(loaded: Any, config: EngineConfig) -> ModelRunner:
    return ModelRunner(loaded, config.cache, config.model, config.scheduler)


def gemma() -> Recipe:
    """As PaliGemma 1 has it: gelu and gains counted from one, without further norms."""
    t = gemma_tokens()
    return Recipe(hf.GemmaConfig(**BODY, **ids_of(t)), t)


def phi4() -> Recipe:
    """Three quarters of each head are turned."""
    recipe = phi3()
    turned = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    recipe.config.rope_parameters = turned
    return recipe


def phi_with_normed_heads() -> Recipe:
    recipe = phi()
    recipe.config.qk_layernorm = True
    return recipe


# Windows; layers of two kinds, capped scores; whole images; whole prompts; cross attention; angles
# that change with the length; positions of three axes, and features between the layers; attention
# beside the MLP; layers of another kind. Whether all layers are fused, and whether any is.
CHECKPOINTS = {
    **dict.fromkeys(("mistral", "qwen2_5_vl", "qwen3_vl", "phi3", "phi4"), (True, True)),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "paligemma2"), (True, True)),
    "mllama": (False, True),
    "phi": (True, True),
    "phi_with_normed_heads": (False, False),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_public_checkpoints_answer_as_by_the_plain_runner(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two requests at once, text and one with a picture; a prompt is computed in two steps."""
    for recipe in (gemma, phi4, phi_with_normed_heads):
        monkeypatch.setitem(TEXT, recipe.__name__, recipe)
    folder = families.build(name, tmp_path_factory.getbasetemp() / "families")
    family = Family(name, folder, open_border(folder))
    asked = ["text", "one" if name in families.VISION else "text"]
    answers = []
    for build in (on_the_plain_runner, on_the_gpus_runner):
        monkeypatch.setattr(engine_module, "build_runner", build)
        driver = checkpoint_driver(folder)
        ids = [driver.submit(family.segments(driver, case), BRIEF) for case in asked]
        driver.run()
        answers.append([(driver.tokens(i), torch.stack(driver.logits[i]).cpu()) for i in ids])
    runner: Any = driver.engine.runner
    assert isinstance(runner, CUDARunner)
    fused = [isinstance(layer, KINDS) for layer in runner.adapter.decoder.layers]
    angles = runner.adapter.decoder.rotary_emb
    assert isinstance(angles, CUDARope) == (runner.adapter.axes == 1)
    assert (runner._fused, any(fused)) == (all(fused), any(fused)) == CHECKPOINTS[name]
    for (wanted, expected), (tokens, logits) in zip(*answers, strict=True):
        assert tokens == wanted
        torch.testing.assert_close(logits[: len(expected)], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mode", ["isolated", "prefix"])
def test_long_chunks_that_read_themselves_are_read_by_the_library(
    mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Text, an image by itself, an image in its context; what reads more stays with the pages."""
    folder = families.build("qwen2_5_vl", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "mmserve_vision_mode": mode}))
    widths: list[tuple[int, int]] = []  # rows, and how many of them are images'

    def seen(chunk: Any, *rest: Any) -> Tensor:
        widths.append((chunk.num_rows, 0 if chunk.images is None else len(chunk.images[0])))
        return read_densely(chunk, *rest)

    read_densely = cuda_step._read_densely
    monkeypatch.setattr(cuda_step, "_read_densely", seen)
    monkeypatch.setattr(cuda_runner, "BUCKETS", (1, 2, 4))
    monkeypatch.setattr(dense_chunks, "DENSE_ROWS", 5)
    family = Family("qwen2_5_vl", folder, open_border(folder))
    answers = []
    for build in (on_the_plain_runner, on_the_gpus_runner):
        monkeypatch.setattr(engine_module, "build_runner", build)
        driver = checkpoint_driver(folder)
        if isinstance(driver.engine.runner, CUDARunner):
            driver.engine.runner._reads_densely = True  # as it does in half precision
        ids = [driver.submit(family.segments(driver, case), BRIEF) for case in ("text", "one")]
        driver.run()
        answers.append([torch.stack(driver.logits[i]).cpu() for i in ids])
    for expected, logits in zip(*answers, strict=True):
        torch.testing.assert_close(logits[: len(expected)], expected, rtol=1e-3, atol=1e-3)
    assert any(not visual for _, visual in widths), "text alone"
    assert any(visual and (visual == rows) is (mode == "isolated") for rows, visual in widths)


class Replayed(Graphs):
    """Captured launches without a GPU: computed each time, from the same fixed places."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.enabled = True

    def clear(self) -> None:
        pass

    def run(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        return compute()


def test_who_looks_at_a_picture_beside_the_text_stands_in_the_tables(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """So that steps of both kinds can be captured: padded, from token ids."""
    folder = families.build("mllama", tmp_path_factory.getbasetemp() / "families")
    family = Family("mllama", folder, open_border(folder))
    monkeypatch.setattr(engine_module, "build_runner", on_the_gpus_runner)
    monkeypatch.setattr(cuda_runner, "BUCKETS", (1, 32))
    answers = []
    for graphs in (Graphs, Replayed):
        monkeypatch.setattr(cuda_runner, "Graphs", graphs)
        driver = checkpoint_driver(folder)
        ids = [driver.submit(family.segments(driver, case), BRIEF) for case in ("text", "one")]
        driver.run()
        answers.append([torch.stack(driver.logits[i]).cpu() for i in ids])
    for expected, logits in zip(*answers, strict=True):
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def checkpoint_driver(folder: Path) -> Driver:
    model = ModelConfig(model=str(folder), device=DEVICE, dtype="float32")
    cache = CacheConfig(text_bytes=1 << 22, vision_bytes=1 << 22)
    config = EngineConfig(model, cache, SchedulerConfig(max_num_batched_tokens=32))
    return Driver(Engine(config, load(model)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="64 rows a step, interpreted, take long")
def test_deterministic_logits_do_not_depend_on_company_or_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "build_runner", on_the_gpus_runner)
    crowd = make_driver(deterministic=True, budget=37)
    ids = [crowd.submit(segments, BRIEF) for segments in mixes(crowd)]
    crowd.run()
    for request, segments in zip(ids, mixes(crowd), strict=True):
        alone = make_driver(deterministic=True)
        lonely = alone.submit(segments, BRIEF)
        alone.run()
        together, apart = (
            torch.stack(d.logits[r])[: BRIEF.max_tokens]
            for d, r in ((crowd, request), (alone, lonely))
        )
        assert torch.equal(together, apart)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="nothing is captured on a CPU")
def test_what_was_captured_is_captured_again_in_larger_room(
    driver: Driver,
) -> None:
    first = driver.submit((words(1, 5),), BRIEF)
    driver.run()
    runner: Any = driver.engine.runner
    runner._make_room(slots=20_000, ints=1 << 19)
    again = driver.submit((words(1, 5),), BRIEF)
    driver.run()
    assert driver.tokens(first) == driver.tokens(again)


def test_beams_copy_their_pages_on_the_gpus_runner_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of a sequence's pages from step to step must not outlive a copy."""
    answers = []
    for build in (on_the_plain_runner, on_the_gpus_runner):
        monkeypatch.setattr(engine_module, "build_runner", build)
        driver = make_driver()
        prompt = (words(4, 14), driver.image(picture(1)), words(5, 7))
        params = replace(BRIEF, max_tokens=5, beams=BeamParams(3, 3))
        request = driver.submit(prompt, params)
        driver.run()
        driver.assert_idle()
        answers.append([choice.token_ids for choice in driver.last(request).choices])
    assert answers[0] == answers[1]

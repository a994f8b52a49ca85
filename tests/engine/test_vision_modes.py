"""How much an image has seen: nothing, everything, or its head everything and its tail nothing."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, TierConfig
from mmserve.engine.engine import Engine
from mmserve.engine.vision_mode import vision_mode
from mmserve.model.adapter import Adapter
from mmserve.model.supported import IMAGE_FAMILIES, Family
from mmserve.model.weights import LoadedCheckpoint, load
from mmserve.request import Constraint, ImageSegment, SamplingParams, Segment, TextSegment
from tests.engine.driver import Driver, picture, words
from tests.engine.tiny import tiny_config, tiny_model
from tests.model import families
from tests.model.border import message

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
PICTURE, OTHER = families.picture(3, 140, 126), families.picture(6, 112, 160)
CASES: list[tuple[Any, ...]] = [
    ("What is this?", PICTURE, " Say it."),
    ("Now to something else: compare", PICTURE, "with", OTHER, "."),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "families"


def serve(
    folder: Path,
    mode: str,
    *,
    head: int = 16,
    declared: bool = False,
    feature_bytes: int = 1 << 22,
    tiers: TierConfig | None = None,
    **steps: int,
) -> Driver:
    model = ModelConfig(model=str(folder), device="cpu", vision_mode=mode, blend_tokens=head)
    loaded = load(model)
    if declared:
        assert isinstance(loaded, LoadedCheckpoint)
        loaded.lm.config.mmserve_vision_mode = "isolated"
    cache = CacheConfig(text_bytes=1 << 22, vision_bytes=1 << 22, feature_bytes=feature_bytes)
    config = EngineConfig(model, cache, SchedulerConfig(**steps), tiers=tiers or TierConfig())
    return Driver(Engine(config, loaded))


def segments(driver: Driver, parts: tuple[Any, ...]) -> tuple[Segment, ...]:
    said = message("user", *parts)
    files = [p.data for p in said.parts if hasattr(p, "data")]
    images = [driver.engine.pipeline.prepare(f, alone=len(files) == 1) for f in files]
    return driver.engine.template.render([said], images).segments


def ask(driver: Driver, parts: tuple[Any, ...]) -> tuple[list[int], Tensor]:
    request = driver.submit(segments(driver, parts), GREEDY)
    driver.run()
    return driver.tokens(request), torch.stack(driver.logits[request])


FAMILIES = ["qwen2_5_vl", "qwen3_vl", "mistral3"]  # with images of more than 16 tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_as_long_as_the_image_is_prefix_mode(name: str, folders: Path) -> None:
    folder = families.build(name, folders)
    exact, blended = serve(folder, "prefix"), serve(folder, "blend", head=1600)
    for parts in CASES:
        (tokens, logits), (same, close) = ask(exact, parts), ask(blended, parts)
        assert tokens == same and torch.equal(logits, close)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("mode", ["blend", "isolated"])
def test_an_image_elsewhere_is_found_and_gives_the_same(
    name: str, mode: str, folders: Path
) -> None:
    folder = families.build(name, folders)
    warm = serve(folder, mode, declared=mode == "isolated")
    ask(warm, CASES[0])
    request = warm.submit(segments(warm, CASES[1]), GREEDY)
    warm.run()
    cold = serve(folder, mode, declared=mode == "isolated", max_num_batched_tokens=24)
    tokens, logits = ask(cold, CASES[1])
    assert warm.tokens(request) == tokens
    torch.testing.assert_close(torch.stack(warm.logits[request]), logits, rtol=0, atol=1e-3)
    usage = warm.last(request).usage
    assert usage is not None and usage.cached_image_tokens > 0
    assert usage.vision_mode == ("blend" if mode == "blend" else None)
    # A head is computed anew wherever its image stands, and makes a miss of it.
    assert (usage.vision_hits, usage.vision_misses) == ((0, 2) if mode == "blend" else (1, 1))
    warm.assert_idle()
    cold.assert_idle()


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_isolated_equals_the_dense_statement(name: str, folders: Path) -> None:
    """transformers' own decoder under the mask that says what an isolated image's rows see."""
    driver = serve(families.build(name, folders), "isolated", declared=True)
    parts = segments(driver, CASES[1])
    request = driver.submit(parts, SamplingParams(max_tokens=1, temperature=0.0))
    driver.run()
    want = dense(driver, families.load(folders / name)[0], parts)
    torch.testing.assert_close(driver.logits[request][0], want, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_in_blend_mode_the_head_is_as_in_prefix_mode_and_the_tail_as_isolated(
    name: str, folders: Path
) -> None:
    folder = families.build(name, folders)
    stored = {}
    for mode in ("isolated", "prefix", "blend"):
        driver = serve(folder, mode, declared=mode == "isolated")
        request = driver.submit(segments(driver, CASES[0]), GREEDY)
        driver.step()
        placed = driver.engine._live[request].seq.images
        pool = driver.engine.runner.vision[0].tensor
        kv = [pool[:, :, :, (p.pages or [])[0]].flatten(3, 4)[:, :, :, p.skip :] for p in placed]
        counts = [p.image.num_tokens for p in placed]
        stored[mode] = torch.cat([x[:, :, :, :n] for x, n in zip(kv, counts, strict=True)], 3)
    assert stored["blend"].shape == stored["prefix"].shape
    torch.testing.assert_close(stored["blend"][:, :, :, :16], stored["prefix"][:, :, :, :16])
    torch.testing.assert_close(stored["blend"][:, :, :, 16:], stored["isolated"][:, :, :, 16:])
    assert not torch.allclose(stored["blend"][:, :, :, 16:], stored["prefix"][:, :, :, 16:])


@pytest.mark.parametrize("feature_bytes", [0, 1 << 22])
@pytest.mark.parametrize(
    ("name", "mode"),
    [("qwen2_5_vl", "prefix"), ("qwen2_5_vl", "blend"), ("gemma3", "prefix"), ("mllama", "auto")],
)
def test_a_prompt_that_comes_again_decodes_no_image(
    name: str, mode: str, feature_bytes: int, folders: Path
) -> None:
    driver = serve(families.build(name, folders), mode, feature_bytes=feature_bytes)
    answers = [ask(driver, CASES[0])[0] for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    _, decodes, _ = driver.counts()
    assert decodes == 1


def test_an_image_whose_features_are_forgotten_is_decoded_for_another_context(
    folders: Path,
) -> None:
    folder = families.build("qwen2_5_vl", folders)
    driver = serve(folder, "prefix", feature_bytes=0)
    other = ("Elsewhere:", PICTURE, "?")
    ask(driver, CASES[0])
    tokens, _ = ask(driver, other)
    assert driver.counts()[1] == 2
    assert tokens == ask(serve(folder, "prefix"), other)[0]


def test_features_in_use_outlive_others(folders: Path) -> None:
    driver = serve(families.build("qwen2_5_vl", folders), "prefix")
    first, second, third = (families.picture(seed, 56, 56) for seed in (1, 2, 3))
    used, idle = (
        s.image.digest for s in segments(driver, (first, second)) if isinstance(s, ImageSegment)
    )
    for picture_ in (first, second):
        ask(driver, ("a", picture_, "b"))
    runner = driver.engine.runner
    runner._features._max_bytes = runner._features._bytes  # two images'
    ask(driver, ("a", first, "b"))  # its KV is found
    ask(driver, ("a", third, "b"))
    assert runner.knows(used)
    assert not runner.knows(idle)


def test_head_and_tail_are_counted_as_one_image(folders: Path) -> None:
    driver = serve(families.build("qwen2_5_vl", folders), "blend")
    parts = segments(driver, CASES[1])
    counts = [s.image.num_tokens for s in parts if isinstance(s, ImageSegment)]
    assert min(counts) > 16
    for hits, cached in ((0, 0), (2, sum(counts))):
        request = driver.submit(parts, GREEDY)
        driver.run()
        usage = driver.last(request).usage
        assert usage is not None and usage.vision_mode == "blend"
        assert (usage.vision_hits, usage.vision_misses) == (hits, 2 - hits)
        assert (usage.image_tokens, usage.cached_image_tokens) == (sum(counts), cached)
    request = driver.submit(segments(driver, CASES[0]), GREEDY)
    driver.run()
    usage = driver.last(request).usage
    assert usage is not None and (usage.vision_hits, usage.vision_misses) == (0, 1)
    assert usage.cached_image_tokens == counts[0] - 16


@pytest.mark.parametrize("mode", ["prefix", "blend", "isolated"])
def test_a_format_holds_in_every_mode(mode: str, folders: Path) -> None:
    driver = serve(families.build("qwen2_5_vl", folders), mode, declared=mode == "isolated")
    choice = Constraint("choice", '["a red circle", "something else"]')
    params = SamplingParams(max_tokens=40, temperature=0.0, constraint=choice)
    request = driver.submit(segments(driver, CASES[1]), params)
    driver.run()
    assert driver.text(request) in ("a red circle", "something else")


@torch.no_grad()
def dense(driver: Driver, model: Any, parts: tuple[Segment, ...]) -> Tensor:
    """The last token's logits, an image's tokens seeing it alone. Its keys are computed as if it
    stood first, which shifts nothing, because rotary attention is relative."""
    embeds, positions, owner = [], [], []
    at = 0
    for number, segment in enumerate(parts):
        if isinstance(segment, TextSegment):
            ids = torch.tensor(segment.token_ids)
            embeds.append(model.get_input_embeddings()(ids))
            count, where = len(ids), torch.arange(len(ids)).expand(3, -1)
            width = count
        else:
            image = segment.image
            assert isinstance(segment, ImageSegment) and image.token_ids is not None
            features = driver.engine.runner.adapter.look(
                image.token_ids, driver.engine.pipeline.pixels(image)
            )
            embeds.append(features.embeds)
            count, width = image.num_tokens, image.width
            plain = torch.arange(count).expand(3, -1)
            where = plain if image.positions is None else torch.as_tensor(image.positions)
        positions.append(where + at)
        owner += [number if isinstance(segment, ImageSegment) else -1] * count
        at += width
    own = torch.tensor(owner)
    total = len(own)
    seen = torch.ones(total, total).tril().bool()
    apart = (own >= 0)[:, None] & (own[:, None] != own[None])
    mask = torch.zeros(total, total).masked_fill(~(seen & ~apart), float("-inf"))
    axes = driver.engine.runner.adapter.axes
    rows = torch.cat(positions, -1)
    hidden = model.get_decoder()(
        inputs_embeds=torch.cat(embeds)[None],
        attention_mask=mask[None, None],
        position_ids=rows[:, None] if axes > 1 else rows[:1],
        use_cache=False,
    ).last_hidden_state
    logits: Tensor = model.lm_head(hidden[0, -1])
    return logits


@pytest.mark.parametrize(
    ("name", "mode", "head", "said"),
    [
        ("llava", "isolated", 16, "trained with images that see the text before them"),
        ("llava", "blend", 10, "multiple of 16"),
        ("llava", "sideways", 16, "none of auto, isolated, prefix, blend"),
        ("paligemma2", "blend", 16, "whole prompt of paligemma sees itself"),
        ("gemma3", "blend", 16, "one rotary embedding for all layers"),
        ("mllama", "prefix", 16, "never see text"),
    ],
)
def test_a_mode_that_cannot_be_is_refused_in_a_sentence(
    name: str, mode: str, head: int, said: str, folders: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        serve(families.build(name, folders), mode, head=head)


def allowed(name: str, folders: Path) -> list[str]:
    """What a checkpoint can be served in, the mode it was made for first."""
    loaded = load(ModelConfig(model=str(families.build(name, folders)), device="cpu"))
    adapter = Adapter(loaded.lm)
    modes = []
    for mode in ("auto", "isolated", "prefix", "blend"):
        with suppress(ValueError):
            modes.append(vision_mode(mode, adapter, stock=True, head=16, page_size=16).name)
    return list(dict.fromkeys(modes))


@pytest.mark.parametrize("family", IMAGE_FAMILIES, ids=lambda family: family.name)
def test_a_family_s_modes_are_those_that_are_listed(family: Family, folders: Path) -> None:
    for name in family.tests:
        assert allowed(name, folders) == list(family.modes)


def native(mode: str, budget: int = 512) -> Driver:
    config = tiny_config(max_num_batched_tokens=budget)
    model = ModelConfig(model="tiny", dtype="float32", vision_mode=mode)
    return Driver(Engine(EngineConfig(model, config.cache, config.scheduler), tiny_model()))


def test_the_native_composition_in_prefix_mode_sees_the_text_before() -> None:
    """And an image that stands first has seen nothing but itself, in either mode."""
    isolated, prefix = native("isolated"), native("prefix")
    first = [(d.image(picture(1)), words(1, 9)) for d in (isolated, prefix)]
    assert isolated.ask(*first[0]) == prefix.ask(*first[1])
    behind = [(words(2, 20), d.image(picture(1)), words(1, 9)) for d in (isolated, prefix)]
    ids = [d.submit(parts) for d, parts in zip((isolated, prefix), behind, strict=True)]
    isolated.run()
    prefix.run()
    assert not torch.equal(isolated.logits[ids[0]][0], prefix.logits[ids[1]][0])
    hits = [d.last(i).usage for d, i in zip((isolated, prefix), ids, strict=True)]
    assert hits[0] is not None and hits[0].vision_hits == 1
    assert hits[1] is not None and hits[1].vision_misses == 1
    cut = native("prefix", budget=7)
    again = cut.submit((words(2, 20), cut.image(picture(1)), words(1, 9)))
    cut.run()
    torch.testing.assert_close(cut.logits[again][0], prefix.logits[ids[1]][0], rtol=0, atol=1e-3)
    prefix.assert_idle()

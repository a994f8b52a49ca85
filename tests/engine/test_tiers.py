"""Tiers below an engine's pools: what was evicted, or computed before a restart, is found again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mmserve.config import TierConfig
from mmserve.engine.engine import Engine
from mmserve.engine.kv_objects import KVObjects
from mmserve.engine.kv_tiers import KVTiers
from mmserve.faults import NO_FAULTS, Faults
from mmserve.tiers.cost import Costs
from mmserve.tiers.stack import TIERS, TierStack
from tests.engine.driver import Driver, picture, words
from tests.engine.test_vision_modes import CASES, ask, serve
from tests.engine.test_windows import KINDS, windowed_model
from tests.engine.tiny import tiny_config, tiny_model
from tests.model import families

MIB = 1 << 20
A, B, C = picture(1), picture(2), picture(3)
HOST = TierConfig(host_bytes=64 * MIB)

MODELS: dict[str, Callable[[], Any]] = {
    "full": tiny_model,
    **{name: partial(windowed_model, kinds) for name, kinds in KINDS.items()},
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return MODELS[request.param]


def driver(
    model: Any, tiers: TierConfig = HOST, faults: Faults = NO_FAULTS, **config: Any
) -> Driver:
    d = Driver(Engine(replace(tiny_config(**config), tiers=tiers, faults=faults), model))
    d.durable = True
    # On a machine this small, whether loading pays depends on the weather.
    if d.engine.tiers is not None:
        d.engine.tiers.costs.worth = lambda *_: True  # type: ignore[method-assign]
    return d


def disk(folder: Path, **more: Any) -> TierConfig:
    return TierConfig(host_bytes=0, folder=folder, **more)


def tiers(d: Driver) -> KVTiers:
    assert d.engine.tiers is not None
    return d.engine.tiers


def settle(d: Driver) -> TierStack:
    """All that was handed down is written."""
    d.run()
    tiers(d).stack.settle()
    tiers(d).stack.check_invariants()
    return tiers(d).stack


def talk(d: Driver) -> list[int]:
    return d.ask(words(1, 150), d.image(A), words(2, 70), d.image(B), words(3, 30))


def flood(d: Driver) -> None:
    """Push everything out of the pools."""
    index = d.engine.runner.vision[0].index
    for seed in range(20, 20 + index.num_pages // 2):
        d.ask(d.image(picture(seed)), words(seed, 3))
    radix = d.engine.scheduler.holdings.radix
    assert radix is not None
    for group in range(len(d.engine.scheduler.holdings.text_groups)):
        radix.evict(group, 10_000)
    assert not any(radix.num_pages)


def found(d: Driver) -> tuple[int, int, int]:
    """Of the last request: cached tokens, image hits and misses."""
    usage = d.last(str(len(d.events) - 1)).usage
    assert usage is not None
    return usage.cached_tokens, usage.vision_hits, usage.vision_misses


def figure(d: Driver, name: str, **labels: str) -> float | None:
    return d.engine.metrics._registry.get_sample_value(f"mmserve:{name}", labels)


def refusals(d: Driver) -> dict[str, float]:
    reasons = ("damaged", "other_model", "unreadable", "unwritable", "queue_full")
    found = {r: figure(d, "kv_refusals_total", source="tier", reason=r) for r in reasons}
    return {reason: count for reason, count in found.items() if count}


def test_what_was_evicted_comes_back_from_host_memory(model: Callable[[], Any]) -> None:
    d = driver(model(), vision_pages=4)
    expected = talk(d)
    flood(d)
    before = d.counts()
    assert talk(d) == expected
    cached, hits, misses = found(d)
    assert cached > 192 and (hits, misses) == (2, 0)
    assert d.counts() == before
    d.assert_idle()
    tiers(d).stack.check_invariants()


def test_a_fresh_engine_goes_on_from_the_disk(model: Callable[[], Any], tmp_path: Path) -> None:
    source = driver(model(), disk(tmp_path))
    expected = talk(source)
    settle(source)
    d = driver(model(), disk(tmp_path))
    assert talk(d) == expected
    cached, hits, misses = found(d)
    assert cached > 192 and (hits, misses) == (2, 0)
    assert d.counts() == (0, 0, 0)
    d.assert_idle()


def test_a_fresh_engine_goes_on_from_an_object_store(tmp_path: Path) -> None:
    config = TierConfig(host_bytes=0, object_store=(tmp_path / "bucket").as_uri())
    (tmp_path / "bucket").mkdir()
    source = driver(tiny_model(), config)
    expected = talk(source)
    source.engine.close()
    d = driver(tiny_model(), config)
    while not tiers(d).stack.used("object_store")[0]:
        tiers(d).stack.settle()
    assert talk(d) == expected
    assert found(d)[0] > 192 and d.counts() == (0, 0, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("host_bytes", [0, 64 * MIB])
def test_on_a_gpu_what_was_evicted_or_computed_before_a_restart_is_found(
    host_bytes: int, tmp_path: Path
) -> None:
    config = TierConfig(host_bytes=host_bytes, folder=tmp_path)
    source = driver(tiny_model(device="cuda"), config, vision_pages=4)
    expected = talk(source)
    settle(source)
    for _ in range(2):
        flood(source)
        before = source.counts()
        assert talk(source) == expected and source.counts() == before
    settle(source)
    d = driver(tiny_model(device="cuda"), config)
    assert talk(d) == expected
    assert found(d)[0] > 192 and d.counts() == (0, 0, 0)
    d.assert_idle()


@pytest.mark.parametrize(("name", "mode"), [("qwen2_5_vl", "prefix"), ("gemma3", "prefix")])
def test_images_in_their_context_come_back_with_the_text_before_them(
    name: str, mode: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = families.build(name, tmp_path_factory.getbasetemp() / "families")
    source = serve(folder, mode, tiers=disk(tmp_path))
    source.durable = True
    expected = [ask(source, case)[0] for case in CASES]
    settle(source)
    d = serve(folder, mode, tiers=disk(tmp_path))
    tiers(d).costs.worth = lambda *_: True  # type: ignore[method-assign]
    for case, tokens in zip(CASES, expected, strict=True):
        assert ask(d, case)[0] == tokens
        assert not found(d)[2]
    assert d.counts()[0] == d.counts()[2] == 0
    d.assert_idle()


def spoil(folder: Path, change: Callable[[bytes], bytes]) -> int:
    files = list(folder.glob("*.kv"))
    for file in files:
        file.write_bytes(change(file.read_bytes()))
    return len(files)


def flipped(data: bytes) -> bytes:
    return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]


def flipped_ahead(data: bytes) -> bytes:
    return data[:20] + bytes([data[20] ^ 1]) + data[21:]


@pytest.mark.parametrize("change", [flipped, flipped_ahead, lambda data: data[:-1], lambda _: b""])
def test_what_is_damaged_is_refused_computed_again_and_counted(
    change: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    source = driver(tiny_model(), disk(tmp_path))
    expected = talk(source)
    settle(source)
    assert spoil(tmp_path, change) == 6  # the last run is beyond what the prompt finds
    d = driver(tiny_model(), disk(tmp_path))
    assert talk(d) == expected
    assert found(d) == (0, 0, 2) and d.counts()[0] == 2
    assert refusals(d) == {"damaged": 5}
    settle(d)
    again = driver(tiny_model(), disk(tmp_path))
    assert talk(again) == expected and found(again)[0] > 192


def test_another_model_s_objects_are_refused_and_counted(tmp_path: Path) -> None:
    source = driver(tiny_model(), disk(tmp_path / "a"))
    expected = talk(source)
    settle(source)
    model = tiny_model()
    model.spec.weights_id = bytes([1] * 32)
    other = driver(model, disk(tmp_path / "b"))
    talk(other)
    settle(other)
    ours, theirs = (sorted((tmp_path / name).glob("*.kv")) for name in "ab")
    assert not {file.name for file in ours} & {file.name for file in theirs}
    for mine, file in zip(ours, theirs, strict=True):
        mine.write_bytes(file.read_bytes())
    d = driver(tiny_model(), disk(tmp_path / "a"))
    assert talk(d) == expected
    assert found(d)[0] == 0 and refusals(d) == {"other_model": 5}


def test_a_small_host_tier_passes_on_to_the_disk_and_never_exceeds_its_budget(
    tmp_path: Path,
) -> None:
    config = TierConfig(host_bytes=100_000, folder=tmp_path, disk_bytes=400_000)
    d = driver(tiny_model(), config, vision_pages=4)
    for seed in range(6):
        d.ask(words(seed, 150), d.image(picture(seed)), words(seed, 20))
        flood(d)
        held = settle(d)
        assert held.used("host")[1] <= 100_000 and held.used("disk")[1] <= 400_000
        on_disk = sum(file.stat().st_size for file in tmp_path.glob("*.kv"))
        assert on_disk == held.used("disk")[1]
    assert held.used("disk")[0] > 1


def test_an_image_s_state_says_where_its_kv_is(tmp_path: Path) -> None:
    d = driver(tiny_model(), vision_pages=4)
    image = d.image(A)
    assert d.engine.images.state(image.image.digest) == "absent"
    d.ask(image, words(1, 5))
    assert d.engine.images.state(image.image.digest) == "active"
    flood(d)
    assert d.engine.images.state(image.image.digest) == "host"
    source = driver(tiny_model(), disk(tmp_path))
    source.ask(image, words(1, 5))
    settle(source)
    fresh = driver(tiny_model(), disk(tmp_path))
    assert fresh.engine.images.state(image.image.digest) == "disk"


def test_what_computing_gives_sooner_is_not_loaded(tmp_path: Path) -> None:
    source = driver(tiny_model(), disk(tmp_path))
    expected = talk(source)
    settle(source)
    d = driver(tiny_model(), disk(tmp_path))
    slow = Costs({"disk": 1.0}, token_s=1e-6, image_token_s=1e-6)
    tiers(d).costs = tiers(d).lifter._costs = slow
    assert talk(d) == expected
    assert found(d) == (0, 0, 2)


def test_what_moves_is_counted_by_tier_and_direction(tmp_path: Path) -> None:
    d = driver(tiny_model(), TierConfig(host_bytes=MIB, folder=tmp_path), vision_pages=4)
    talk(d)
    settle(d)
    flood(d)
    talk(d)
    settle(d)
    for tier in TIERS[:2]:
        objects, num_bytes = tiers(d).stack.used(tier)
        assert figure(d, "tier_objects", tier=tier) == objects > 0
        assert figure(d, "tier_bytes", tier=tier) == num_bytes
        down = figure(d, "tier_moved_bytes_total", tier=tier, direction="down")
        assert down is not None and down >= num_bytes
    up = figure(d, "tier_moved_bytes_total", tier="host", direction="up")
    text = figure(d, "tier_hit_tokens_total", kind="text")
    assert up and text == 192 and figure(d, "tier_hit_tokens_total", kind="image") == 40
    rate = figure(d, "cache_hit_rate", cause="tier")
    assert rate is not None and 0 < rate < 1 and figure(d, "cache_hit_rate", cause="prefix") == 0


def test_without_memory_for_a_copy_what_is_evicted_is_lost_and_no_step_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    d = driver(tiny_model(), vision_pages=4)
    expected = talk(d)
    with monkeypatch.context() as patch:
        patch.setattr(KVObjects, "read", fail)
        flood(d)
    assert talk(d) == expected and found(d) == (0, 0, 2)
    assert refusals(d)["unwritable"] >= 6
    d.assert_idle()


def test_the_kv_of_what_is_not_stored_never_reaches_the_disk(tmp_path: Path) -> None:
    d = driver(tiny_model(), TierConfig(host_bytes=100_000, folder=tmp_path), vision_pages=4)
    d.durable = False
    expected = talk(d)
    flood(d)
    settle(d)
    assert not list(tmp_path.iterdir())
    d.durable = True
    assert talk(d) == expected
    settle(d)
    assert len(list(tmp_path.glob("*.kv"))) == 6

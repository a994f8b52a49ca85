"""KV files and engines: what one engine computed, another one of the same model finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mmserve.cache.kv_pool import KVShape, TextKVPool, VisionKVPool
from mmserve.cache.radix_cache import RadixCache
from mmserve.cache.radix_node import HOLE
from mmserve.engine import kv_transfer
from mmserve.engine.engine import Engine
from mmserve.engine.kv_transfer import KVTransfer, Part, Placed
from mmserve.kvfile.file import read_file, write_file
from mmserve.kvfile.header import Group, Identity, KVMismatchError
from mmserve.model.rope import asked
from tests.engine.driver import Driver, picture, words
from tests.engine.test_vision_modes import CASES, ask, serve
from tests.engine.test_windows import KINDS, windowed_model
from tests.engine.tiny import build_tiny, tiny_config, tiny_model
from tests.kvfile.files import identity
from tests.model import families

A, B, C = picture(1), picture(2), picture(3)
PAGE = 16
ON_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
)
LINEAR = {"rope_type": "linear", "factor": 2.0}
Talk = Callable[[Driver], list[int]]

MODELS: dict[str, Callable[[], Any]] = {
    "full": tiny_model,
    **{name: partial(windowed_model, kinds) for name, kinds in KINDS.items()},
}


def driver(model: Any, **config: Any) -> Driver:
    return Driver(Engine(tiny_config(**config), model))


def first(d: Driver) -> list[int]:
    return d.ask(words(1, 50), d.image(A), words(2, 30), d.image(B), words(3, 20))


def branch(d: Driver) -> list[int]:
    return d.ask(words(1, 50), d.image(A), words(2, 30), d.image(C), words(4, 40))


def elsewhere(d: Driver) -> list[int]:
    return d.ask(words(5, 9), d.image(B), words(6, 40))


TALKS: tuple[Talk, ...] = (first, branch, elsewhere)


def cached(d: Driver) -> tuple[int, int, int]:
    """Of the last request: cached tokens, image hits and misses."""
    usage = d.last(str(len(d.events) - 1)).usage
    assert usage is not None
    return usage.cached_tokens, usage.vision_hits, usage.vision_misses


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return MODELS[request.param]


def test_a_fresh_engine_goes_on_from_a_file_with_the_same_tokens(
    model: Callable[[], Any], tmp_path: Path
) -> None:
    source = driver(model())
    expected = [talk(source) for talk in TALKS]
    again = []
    for talk in TALKS:
        assert talk(source) in expected
        again.append(cached(source))
    write_file(tmp_path / "a.kv", source.engine.collect_kv())

    d = driver(model())
    placed = d.engine.kv.put(d.engine.read_kv(tmp_path / "a.kv"))
    d.engine.scheduler.check_invariants()
    d.assert_idle()
    assert placed.images == Part(new=3) and placed.text.new > 0 == placed.text.left_out
    for talk, tokens, found in zip(TALKS, expected, again, strict=True):
        assert talk(d) == tokens
        assert cached(d) == found and found[0] > 0 and found[2] == 0
    assert d.counts() == (0, 0, 0)
    d.assert_idle()


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("gemma2", "auto"),
        ("gemma3", "prefix"),
        ("mllama", "auto"),
        ("qwen2_5_vl", "prefix"),
        ("qwen2_5_vl", "blend"),
    ],
)
def test_public_families_go_on_from_a_file(
    name: str, mode: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Windows, layers that look at images alone, images in their context and in parts."""
    folder = families.build(name, tmp_path_factory.getbasetemp() / "families")
    cases = CASES if name in families.VISION else [("A text that is long enough for pages. ",)]
    source = serve(folder, mode)
    expected = [ask(source, case)[0] for case in cases]
    write_file(tmp_path / "a.kv", source.engine.collect_kv())

    d = serve(folder, mode)
    d.engine.kv.put(d.engine.read_kv(tmp_path / "a.kv"))
    for case, tokens in zip(cases, expected, strict=True):
        assert ask(d, case)[0] == tokens
        found, _, misses = cached(d)
        assert found > 0 and not misses
    assert d.counts()[0] == d.counts()[2] == 0
    d.assert_idle()


def test_what_goes_in_comes_out_bit_for_bit(model: Callable[[], Any], tmp_path: Path) -> None:
    source = driver(model())
    for talk in TALKS:
        talk(source)
    write_file(tmp_path / "a.kv", source.engine.collect_kv())
    d = driver(model())
    d.engine.kv.put(d.engine.read_kv(tmp_path / "a.kv"))
    write_file(tmp_path / "b.kv", d.engine.collect_kv())
    one, two = read_file(tmp_path / "a.kv"), read_file(tmp_path / "b.kv")
    assert [image.key for image in two.header.images] == [image.key for image in one.header.images]
    sums = [sorted(file.header.checksums.values()) for file in (one, two)]
    assert sums[0] == sums[1] and len(sums[0]) > 6


def test_a_window_s_holes_stay_holes() -> None:
    source = driver(windowed_model(KINDS["hybrid"]))
    expected = source.ask(words(1, 150))
    radix = source.engine.scheduler.holdings.radix
    assert radix is not None and radix.evict(1, 4) == 4
    file = source.engine.kv.collect()
    (run,) = file.header.runs
    assert run.pages == (tuple(range(9)), tuple(range(4, 9)))

    d = driver(windowed_model(KINDS["hybrid"]))
    assert d.engine.kv.put(file).text == Part(new=len(run.tokens))
    assert [pool.num_pages - pool.num_free for pool in d.engine.scheduler.text] == [9, 5]
    assert d.ask(words(1, 150)) == expected
    assert cached(d)[0] == 144


def test_what_is_known_is_not_taken_in_again() -> None:
    d = build_driver()
    for talk in TALKS:
        talk(d)
    file = d.engine.kv.collect()
    free = [pool.num_free for pool in d.engine.scheduler.text]
    placed = d.engine.kv.put(file)
    assert placed == Placed(Part(known=file.header.num_text_tokens), Part(known=3))
    assert [pool.num_free for pool in d.engine.scheduler.text] == free
    d.engine.scheduler.check_invariants()


def test_a_run_that_is_known_in_part_is_completed() -> None:
    source, d = build_driver(), build_driver()
    source.ask(words(1, 100))
    d.ask(words(1, 40))
    placed = d.engine.kv.put(source.engine.kv.collect())
    assert placed.text.left_out == 0
    d.engine.scheduler.check_invariants()
    assert d.ask(words(1, 100)) == source.ask(words(1, 100))
    assert cached(d)[0] == cached(source)[0] == 96


def test_a_small_pool_takes_what_was_used_last() -> None:
    source = build_driver()
    for talk in (elsewhere, first, branch):
        talk(source)
    file = source.engine.kv.collect()
    d = Driver(build_tiny(tiny_config(text_pages=10, vision_pages=4)))
    placed = d.engine.kv.put(file)
    d.engine.scheduler.check_invariants()
    d.assert_idle()
    total = file.header.num_text_tokens
    assert placed.images == Part(new=2, left_out=1)
    assert placed.text.left_out > 0 < placed.text.new
    assert placed.text.new + placed.text.left_out == total
    kept = [image.key for image in file.header.images[:2]]
    assert [key for key, _ in d.engine.runner.vision[0].index.stored()] == kept


def test_the_most_useful_image_is_the_last_to_be_evicted() -> None:
    source = build_driver()
    for data in (A, B, C):
        source.ask(source.image(data), words(1, 3))
    d = Driver(build_tiny(tiny_config(vision_pages=6)))
    d.engine.kv.put(source.engine.kv.collect())
    d.ask(d.image(picture(4)), words(1, 3))
    kept = {key for key, _ in d.engine.runner.vision[0].index.stored()}
    assert source.image(C).image.digest in kept and source.image(A).image.digest not in kept


def test_the_most_useful_text_is_the_last_to_be_evicted() -> None:
    source = build_driver()
    for seed in (1, 2, 3):
        source.ask(words(seed, 60))
    d = build_driver()
    d.engine.kv.put(source.engine.kv.collect())
    d.engine.scheduler.holdings.radix.evict(0, 4)  # type: ignore[union-attr]
    for seed, found in ((3, 48), (1, 0)):
        d.ask(words(seed, 60))
        assert cached(d)[0] == found


def test_what_runs_and_what_is_stored_are_not_disturbed() -> None:
    source = build_driver()
    for talk in TALKS:
        talk(source)
    alone = Driver(build_tiny(tiny_config(text_pages=16, vision_pages=6)))
    expected = elsewhere(alone)

    d = Driver(build_tiny(tiny_config(text_pages=16, vision_pages=6)))
    d.ask(d.image(picture(9)), words(9, 3))
    request = d.submit((words(5, 9), d.image(B), words(6, 40)))
    d.step()
    placed = d.engine.kv.put(source.engine.kv.collect())
    d.engine.scheduler.check_invariants()
    assert placed.images == Part(new=1, known=1, left_out=1)
    d.run()
    assert d.tokens(request) == expected
    assert d.engine.runner.vision[0].index.is_ready(d.image(picture(9)).image.digest)
    d.assert_idle()


def test_a_file_written_while_steps_are_in_the_air_holds_what_is_computed(tmp_path: Path) -> None:
    source = build_driver()
    expected = elsewhere(source)
    source.engine.overlaps = True
    request = source.submit((words(1, 50), source.image(A), words(2, 30)))
    for _ in range(4):
        source.step()
    assert 0 < len(source.tokens(request)) < 8
    write_file(tmp_path / "a.kv", source.engine.collect_kv())
    source.run()
    tokens = source.tokens(request)

    d = build_driver()
    d.engine.kv.put(d.engine.read_kv(tmp_path / "a.kv"))
    assert elsewhere(d) == expected
    assert d.ask(words(1, 50), d.image(A), words(2, 30)) == tokens
    assert cached(d) == (84, 1, 0) and d.counts() == (0, 0, 0)


def test_a_copy_that_fails_leaves_the_books_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    source = build_driver()
    for talk in TALKS:
        talk(source)
    file = source.engine.kv.collect()

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    d = build_driver()
    monkeypatch.setattr(kv_transfer, "scatter", fail)
    for put in (d.engine.kv._put_texts, d.engine.kv._put_images):
        with pytest.raises(RuntimeError):
            put(file)
        d.engine.scheduler.check_invariants()
        d.assert_idle()
    assert [pool.num_free for pool in d.engine.scheduler.text] == [200]
    assert not d.engine.runner.vision[0].index.stored()


def test_an_engine_without_a_prefix_cache_takes_images_alone() -> None:
    source = build_driver()
    first(source)
    file = source.engine.kv.collect()
    d = Driver(build_tiny(tiny_config(prefix_caching=False)))
    placed = d.engine.kv.put(file)
    assert placed == Placed(Part(left_out=file.header.num_text_tokens), Part(new=2))
    assert not d.engine.kv.collect().header.runs


def test_a_file_of_other_weights_is_refused_and_all_is_computed(tmp_path: Path) -> None:
    source = build_driver()
    expected = first(source)
    write_file(tmp_path / "a.kv", source.engine.collect_kv())
    model = tiny_model()
    model.spec.weights_id = bytes([1] * 32)
    d = driver(model)
    with pytest.raises(KVMismatchError) as refused:
        d.engine.kv.put(d.engine.read_kv(tmp_path / "a.kv"))
    assert refused.value.field == "weights"
    assert first(d) == expected
    assert d.counts()[0] == 2


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("weights_dtype", lambda: Driver(build_tiny(tiny_config(dtype="int8")))),
        (
            "rope",
            lambda: driver(replace(tiny_model(), rope_scaling=asked(LINEAR, 512))),
        ),
        ("groups", lambda: driver(windowed_model(KINDS["hybrid"]))),
        ("groups[0].window", lambda: driver(windowed_model(KINDS["windows only"]))),
    ],
)
def test_an_engine_s_own_identity_tells_others_apart(
    field: str, change: Callable[[], Driver]
) -> None:
    ours, theirs = build_driver().engine.kv.identity, change().engine.kv.identity
    if field.startswith("groups"):  # another architecture, too; here the geometry is asked
        theirs = replace(ours, groups=theirs.groups)
    with pytest.raises(KVMismatchError) as refused:
        ours.require(theirs)
    assert refused.value.field == field


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pools_of_any_kind_give_and_take_the_same_bits(
    dtype: torch.dtype, device: str, tmp_path: Path
) -> None:
    one, two = pools(dtype, device), pools(dtype, "cpu")
    random = torch.Generator().manual_seed(1)
    for pool in (*one._text, *one._vision):
        shape = pool.tensor.shape
        pool.tensor.copy_(torch.randn(shape, generator=random).to(dtype))
    held = [pool.pages.allocate(n) for pool, n in zip(one._text, (3, 1), strict=True)]
    assert one._radix is not None and two._radix is not None
    keys = [1, 2, (b"i", 3), 4, 5, 6, 7, 8, 9, 10, 11, 12]
    one._radix.insert(keys, [held[0], [HOLE, HOLE, *held[1]]])
    write_file(tmp_path / "a.kv", one.collect())
    placed = two.put(read_file(tmp_path / "a.kv", two.identity))
    assert placed == Placed(Part(new=12), Part())
    found = two._radix.match([*keys, 13], lambda n: [0, max(n - 4, 0)])
    assert found.num_tokens == 12 and found.pages[1][:2] == [HOLE, HOLE]
    for g in (0, 1):
        pages = [page for page in found.pages[g] if page != HOLE]
        given, taken = one._text[g].tensor[:, :, :, held[g]], two._text[g].tensor[:, :, :, pages]
        assert torch.equal(given.cpu(), taken)


def pools(dtype: torch.dtype, device: str) -> KVTransfer:
    own: Identity = identity(dtype=str(dtype).removeprefix("torch."))
    shapes = [_shape(group, own, dtype, device) for group in own.groups]
    text = [TextKVPool(shape, 8 * shape.page_bytes) for shape in shapes]
    vision = [VisionKVPool(shape, 8 * shape.page_bytes) for shape in shapes]
    windowed = [group.window is not None for group in own.groups]
    radix = RadixCache([pool.pages for pool in text], own.page_size, windowed)
    return KVTransfer(own, text=text, vision=vision, radix=radix)


def _shape(group: Group, own: Identity, dtype: torch.dtype, device: str) -> KVShape:
    heads, size = group.kv_heads, group.head_dim
    return KVShape(len(group.layers), heads, size, own.page_size, dtype, torch.device(device))


def build_driver() -> Driver:
    return driver(tiny_model())

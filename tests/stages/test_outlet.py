"""What a stage worker's engine sends: the bytes of its pools, each layer before the next."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmserve.config import EngineConfig
from mmserve.engine.kv_objects import KVObjects
from mmserve.handover.arrival import Arrival, Ports
from mmserve.handover.wire import Piece
from mmserve.request import ImageSegment
from mmserve.stages.outlet import Errand, Outlet, StageEngine
from mmserve.tiers.kv_object import KVObject, Owner, Waits
from mmserve.tiers.names import RUN_PAGES, image_name, run_names
from tests.engine.driver import Driver, picture, words
from tests.engine.recipes import on_the_gpus_runner
from tests.engine.test_windows import KINDS, windowed_model
from tests.engine.tiny import LAYERS, tiny_config, tiny_model


class Bench:
    """An engine, its outlet, and what has left it."""

    def __init__(self, engine: StageEngine) -> None:
        self.engine = engine
        self.driver = Driver(engine)
        self.outlet = engine.outlet = Outlet(engine)
        self.owner = Owner(engine.kv.identity)
        self.pieces: list[Piece] = []
        self.objects: dict[bytes, KVObject] = {}
        self._arrivals: dict[bytes, Arrival] = {}
        self._ports = Ports(torch.device("cpu"))

    def send(self, piece: Piece, payload: Tensor, done: Waits) -> None:
        done.synchronize()
        self.pieces.append(piece)
        first = piece.names[0]
        arrival = self._arrivals.setdefault(first, Arrival(piece, self.owner, self._ports))
        self.objects |= {item.name: item for item in arrival.add(piece, payload)}

    def compute(self, *segments: Any) -> list[bytes]:
        """Have all of a prompt sent; the names of its runs."""
        self._arrivals.clear()
        request = self.driver.submit(segments, prefill_only=True)
        seq = self.engine._live[request].seq
        tokens = RUN_PAGES * self.engine.scheduler.page_size
        names = run_names(self.owner.seed, seq.keys, tokens)
        keys = {placed.key for placed in seq.images}
        self.outlet.errands[request] = Errand(1, frozenset(names), keys, self.send)
        while self.engine.has_work:
            self.driver.step()
            self.outlet.send_images()
        del self.outlet.errands[request]
        self.prompt = seq
        return names

    def stored(self, name: bytes, number: int) -> KVObject:
        """A run of the last prompt, as the prefix cache has it."""
        radix = self.engine.scheduler.radix
        assert radix is not None
        pages = radix.find(self.prompt.keys).pages[0][RUN_PAGES * number :][:RUN_PAGES]
        tokens = RUN_PAGES * self.engine.scheduler.page_size
        runner = self.engine.runner
        objects = KVObjects(self.owner, runner.text, runner.vision)
        return objects.read(name, "text", tokens, {0: pages}, durable=False)


def bench(config: EngineConfig | None = None, *, on_gpus_runner: bool = False) -> Bench:
    make = on_the_gpus_runner if on_gpus_runner else None
    config = config or tiny_config(max_num_batched_tokens=100)
    return Bench(StageEngine(config, tiny_model(), make_runner=make))


@pytest.mark.parametrize(
    ("on_gpus_runner", "rest"), [(False, 120), (True, 10)], ids=["the CPU's runner", "the GPU's"]
)
def test_what_leaves_is_what_the_pools_hold(on_gpus_runner: bool, rest: int) -> None:
    b = bench(on_gpus_runner=on_gpus_runner)
    image = b.driver.image(picture(1))
    names = b.compute(words(1, 60), image, words(2, rest))
    assert len(names) == (60 + rest) // 64
    for number, name in enumerate(names):
        there = b.stored(name, number)
        assert b.objects[name].parts == there.parts
        assert torch.equal(b.objects[name].memory, there.memory)
    seen = b.objects[image_name(b.owner.seed, image.image.digest)]
    assert seen.parts.kind == "image" and seen.memory.any()


def test_a_layer_leaves_before_the_next_one_is_computed() -> None:
    b = bench(tiny_config(max_num_batched_tokens=300))
    passed: list[tuple[int, int]] = []
    for number, layer in enumerate(b.engine.runner.adapter.decoder.layers):
        layer.register_forward_pre_hook(lambda *_, n=number: passed.append((n, len(b.pieces))))
    names = b.compute(words(3, 200))
    assert passed == [(number, number) for number in range(LAYERS)]
    assert [piece.names for piece in b.pieces] == [tuple(names)] * LAYERS  # of all runs at once


def test_what_was_cached_leaves_with_the_first_step_and_what_is_not_wanted_never() -> None:
    b = bench()
    b.compute(words(4, 200))
    b.pieces.clear()
    names = b.compute(words(4, 200), words(5, 90))
    assert {n for piece in b.pieces for n in piece.names} == set(names) and len(names) == 4
    assert torch.equal(b.objects[names[0]].memory, b.stored(names[0], 0).memory)


@pytest.mark.parametrize("kind", KINDS)
def test_windows_leave_out_what_has_passed_by(kind: str) -> None:
    config = tiny_config(max_num_batched_tokens=100)
    b = Bench(StageEngine(config, windowed_model(KINDS[kind])))
    image: ImageSegment = b.driver.image(picture(2))
    names = b.compute(words(6, 90), image, words(7, 120))
    assert set(b.objects) <= {*names, image_name(b.owner.seed, image.image.digest)}
    b.driver.assert_idle()

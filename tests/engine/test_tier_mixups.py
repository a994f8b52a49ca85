"""Pictures whose names are alike come back from a tier as themselves: never another one's KV."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mmserve.config import TierConfig
from mmserve.request import ImageInput, ImageSegment
from tests.engine.driver import GREEDY, Driver, words
from tests.engine.test_tiers import disk, driver, figure, settle
from tests.engine.tiny import IMAGE_SIZE, IMAGE_TOKENS, tiny_model

MIB = 1 << 20
BRIEF = replace(GREEDY, max_tokens=2)
AT_ONCE = 16


def named(number: int) -> ImageSegment:
    """Noise of its own, by a digest that differs from the others' in the middle alone."""
    digest = b"\xab\xcd" * 7 + number.to_bytes(4, "big") + b"\xab\xcd" * 7
    shape = (1, 3, IMAGE_SIZE, IMAGE_SIZE)
    pixels = np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)
    return ImageSegment(ImageInput(digest, b"", IMAGE_TOKENS, pixels))


def looks(d: Driver, count: int) -> Tensor:
    """[count, V]: what is said first of each, to one question."""
    found = []
    for first in range(0, count, AT_ONCE):
        some = range(first, min(first + AT_ONCE, count))
        asked = [d.submit((words(1, 4), named(n), words(2, 6)), BRIEF) for n in some]
        d.run()
        found += [d.logits.pop(request)[0] for request in asked]
    return torch.stack(found)


@pytest.mark.parametrize(("below", "count"), [("host", 1000), ("disk", 100)])
def test_each_picture_of_many_is_found_again_as_itself(
    below: str, count: int, tmp_path: Path
) -> None:
    tiers = TierConfig(host_bytes=64 * MIB) if below == "host" else disk(tmp_path)

    def engine(config: TierConfig) -> Driver:
        room = 4 * AT_ONCE
        return driver(tiny_model(), config, prefix_caching=False, text_pages=100, vision_pages=room)

    wanted = looks(engine(TierConfig()), count)
    near, next_best = 1e-3, (wanted[1:] - wanted[:-1]).abs().amax(1)
    assert next_best.min() > 10 * near, "pictures that are mixed up would be seen"
    d = engine(tiers)
    for _ in range(2):
        assert (looks(d, count) - wanted).abs().max() < near
        settle(d)
    assert (figure(d, "vision_encoder_runs_total") or 0) < 1.1 * count

"""The planner beside what was measured on one H200 (docs/performance.md), and its own laws."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest

from mmserve.plan.hardware import MACHINES, find_hardware
from mmserve.plan.model import find_model
from mmserve.plan.roofline import Roofline, size_pools
from mmserve.plan.traffic import Traffic

CLOSE = 0.2
DECODING = [  # model, batch, tokens of context, tokens/s measured
    ("mistral-7b", 1, 512, 255.0),
    ("mistral-7b", 1, 1024, 243.3),
    ("mistral-7b", 64, 1024, 9_303),
    ("mistral-7b", 64, 4096, 4_875),
    ("qwen2.5-7b", 1, 512, 259.7),
    ("qwen2.5-7b", 64, 1024, 11_361),
    ("qwen2.5-7b", 64, 4096, 7_647),
    ("smolvision-135m", 1, 1024, 1_293),
]
FIRST_TOKENS = [  # model, text tokens, new images, known images, ms measured
    ("mistral-7b", 32, 0, 0, 5.8),
    ("qwen2.5-7b", 32, 0, 0, 6.0),
    ("idefics2-8b", 32, 0, 5, 5.9),
    ("idefics2-8b", 32, 1, 4, 30),
    ("idefics2-8b", 32, 5, 0, 126),
    ("qwen2.5-vl-7b", 32, 0, 5, 7.6),
    ("qwen2.5-vl-7b", 32, 1, 4, 51),
    ("qwen2.5-vl-7b", 32, 5, 0, 229),
]
PREFILL = [("mistral-7b", 603), ("qwen2.5-7b", 606)]  # TFLOP/s of 8,192 tokens


@cache
def roofline(model: str) -> Roofline:
    return Roofline(find_model(model), MACHINES["h200"])


@pytest.mark.parametrize(("model", "batch", "context", "measured"), DECODING)
def test_decoding_is_as_fast_as_was_measured(
    model: str, batch: int, context: int, measured: float
) -> None:
    planned = roofline(model).tokens_per_s(batch, context)
    assert planned == pytest.approx(measured, rel=CLOSE)


@pytest.mark.parametrize(("model", "text", "new", "known", "measured"), FIRST_TOKENS)
def test_first_tokens_come_when_they_were_measured_to(
    model: str, text: int, new: int, known: int, measured: float
) -> None:
    found = known * roofline(model).model.sizes.image_tokens
    planned = 1e3 * roofline(model).first_token_seconds(text, new, found)
    assert planned == pytest.approx(measured, rel=CLOSE)


@pytest.mark.parametrize(("model", "measured"), PREFILL)
def test_long_prompts_are_computed_at_the_measured_rate(model: str, measured: float) -> None:
    line = roofline(model)
    rate = line.model.sizes.prefill_flops(8192) / line.first_token_seconds(8192)
    assert rate / 1e12 == pytest.approx(measured, rel=CLOSE)


def test_a_wider_machine_is_never_slower() -> None:
    line = roofline("mistral-7b")
    slow = Roofline(line.model, dataclasses.replace(line.hardware, bytes_per_s=1e12))
    assert slow.step_seconds(8, 1024) > line.step_seconds(8, 1024)
    assert slow.first_token_seconds(32) > line.first_token_seconds(32)


def test_pools_fill_what_weights_leave_and_no_more() -> None:
    line, traffic = roofline("idefics2-8b"), Traffic()
    pools = size_pools(line.model, line.hardware, traffic)
    used = pools.text_bytes + pools.vision_bytes + line.model.bytes_held
    assert used == pytest.approx(0.9 * line.hardware.memory, rel=1e-6)
    assert pools.images * line.model.image_kv <= pools.vision_bytes
    assert pools.sessions * traffic.text_tokens(4) <= pools.text_tokens


def test_without_images_all_room_is_text_s() -> None:
    line = roofline("idefics2-8b")
    pools = size_pools(line.model, line.hardware, Traffic(images=0))
    assert pools.vision_bytes == pools.images == 0 < pools.text_tokens


def test_weights_that_do_not_fit_are_refused_by_their_size() -> None:
    small = find_hardware("h200", memory=8e9)
    with pytest.raises(ValueError, match=r"mistral-7b holds 14\.5 GB of weights; h200 has 8\.0"):
        size_pools(roofline("mistral-7b").model, small, Traffic(images=0))

"""A composition whose layers partly see a window: it equals plain dense passes, to its last token,
and its books give back what the window has passed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from mmserve.engine.engine import Engine
from mmserve.request import Segment, TextSegment
from tests.engine.driver import GREEDY, Driver, picture, words
from tests.engine.tiny import HIDDEN, LAYERS, VOCAB, tiny_config, tiny_model
from tests.model.dense import embed, image_mask

WINDOW = 37
A, B = picture(1), picture(2)
KINDS = {
    "hybrid": ("full_attention", "sliding_attention", "sliding_attention"),
    "windows only": ("sliding_attention",) * LAYERS,
}


def windowed_model(kinds: tuple[str, ...]) -> Any:
    torch.manual_seed(5)
    config = Qwen2Config(
        hidden_size=HIDDEN,
        intermediate_size=80,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=4096,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=list(kinds),
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    config._attn_implementation = "eager"
    lm = Qwen2ForCausalLM(config).eval().requires_grad_(False)
    for parameter in lm.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3)
    return replace(tiny_model(), lm=lm)


def dense(model: Any, segments: tuple[Segment, ...]) -> Tensor:
    """Logits [T, vocab] of one plain pass."""
    embeddings, image_of = embed(model, segments)
    seen = image_mask(image_of)
    index = torch.arange(len(image_of))
    near = (index[:, None] - index[None, :] < WINDOW) | (torch.tensor(image_of)[:, None] > 0)
    masks = {
        kind: torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))[None, None]
        for kind, mask in (("full_attention", seen), ("sliding_attention", seen & near))
    }
    out = model.lm(
        inputs_embeds=embeddings[None],
        attention_mask={kind: masks[kind] for kind in set(model.lm.config.layer_types)},
        position_ids=index[None],
        use_cache=False,
    )
    logits: Tensor = out.logits[0].float()
    return logits


@pytest.fixture(params=KINDS)
def kinds(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return KINDS[request.param]


@pytest.mark.parametrize("budget", [7, 64])
def test_windows_equal_dense_cold_and_found_again(kinds: tuple[str, ...], budget: int) -> None:
    plain = windowed_model(kinds)
    d = Driver(Engine(tiny_config(max_num_batched_tokens=budget), windowed_model(kinds)))
    first = (words(1, 50), d.image(A), words(2, 30), d.image(B), words(3, 20))
    for segments in (first, first, (*first, words(4, 45)), (words(5, 3), d.image(A), words(6, 9))):
        request = d.submit(segments)
        d.run()
        whole = (*segments, TextSegment(tuple(d.tokens(request)[:-1])))
        expected = dense(plain, whole)[-len(d.tokens(request)) :]
        got = torch.stack(d.logits[request])
        assert float((got - expected).abs().max()) <= 1e-3
    usage = d.last(request).usage
    assert usage is not None and usage.vision_hits == 1
    d.assert_idle()


def test_an_answer_longer_than_a_windows_pool_is_finished(kinds: tuple[str, ...]) -> None:
    d = Driver(Engine(tiny_config(text_pages=16, prefix_caching=False), windowed_model(kinds)))
    groups = d.engine.runner.groups
    (g,) = (g for g, group in enumerate(groups) if group.window)
    request = d.submit((words(1, 9),), replace(GREEDY, max_tokens=200, ignore_eos=True))
    most = 0
    while d.engine.has_work:
        d.step()
        pool = d.engine.scheduler.text[g]
        most = max(most, pool.num_pages - pool.num_free)
    assert len(d.tokens(request)) == 200 and most <= 4
    d.assert_idle()

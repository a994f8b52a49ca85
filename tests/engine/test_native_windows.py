"""A native model whose layers have windows by its description: served as a dense pass says."""

from __future__ import annotations

import pytest
import torch

from mmserve.engine.engine import Engine
from mmserve.model.loader import set_windows
from mmserve.model.spec import Windows
from mmserve.request import ImageSegment
from tests.engine.driver import Driver, picture, words
from tests.engine.tiny import LAYERS, tiny_config, tiny_model
from tests.model.dense import LayerMasks, additive, embed, image_mask, windowed_mask

WINDOWS = Windows(window=24, full_every=2)


def driver() -> Driver:
    loaded = tiny_model()
    set_windows(loaded.lm, WINDOWS)
    return Driver(Engine(tiny_config(), loaded))


def test_every_so_manieth_layer_reads_all() -> None:
    five = Windows(window=100, full_every=6)
    assert [number for number in range(13) if five.of(number) is None] == [5, 11]
    groups = driver().engine.runner.groups
    assert {group.window: group.layers for group in groups} == {None: (1,), 24: (0, 2)}


@pytest.mark.parametrize(("window", "full_every"), [(0, 6), (100, 1), (-5, 2)])
def test_what_is_no_pattern_is_refused(window: int, full_every: int) -> None:
    with pytest.raises(ValueError, match="no pattern"):
        Windows(window, full_every)


def test_answers_equal_a_dense_pass_in_which_each_layer_has_its_mask() -> None:
    d, plain = driver(), tiny_model()
    masks = LayerMasks(plain.lm, lambda number: int(WINDOWS.of(number) is not None))
    pictures = [ImageSegment(d.engine.pipeline.prepare(picture(n))) for n in (1, 2)]
    prompt = (words(1, 30), pictures[0], words(2, 20), pictures[1], words(3, 9))
    answered = d.ask(*prompt)
    embeds, image_of = embed(plain, prompt)
    for token, ours in zip(answered, d.logits["0"], strict=True):
        seen = image_mask(image_of), windowed_mask(image_of, WINDOWS.window)
        masks.masks = [additive(mask) for mask in seen]
        logits = plain.lm(inputs_embeds=embeds[None], use_cache=False).logits[0, -1]
        torch.testing.assert_close(ours, logits, rtol=1e-3, atol=1e-3)
        assert int(logits.argmax()) == token
        said = plain.lm.get_input_embeddings()(torch.tensor([token]))
        embeds, image_of = torch.cat([embeds, said]), [*image_of, 0]
    assert len(embeds) > 3 * WINDOWS.window and LAYERS == 3


def test_a_found_prefix_answers_as_when_it_was_new() -> None:
    d = driver()
    shown = ImageSegment(d.engine.pipeline.prepare(picture(1)))
    first = d.ask(words(1, 40), shown, words(2, 30))
    d.ask(words(5, 10), shown, words(6, 30))
    assert d.ask(words(1, 40), shown, words(2, 30)) == first
    d.assert_idle()

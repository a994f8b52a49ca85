"""Text whose pages are stored as a whole: every query reads its own page as the model computed it,
and those before it as they are stored, whatever else is computed when."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AttentionInterface

import tests.engine.driver
import tests.kernels.interpreter
from mmserve.config import EngineConfig
from mmserve.engine import engine as engine_module
from mmserve.engine.engine import Engine
from mmserve.kernels.kv_formats import FORMATS, KVFormat, Part, decode_pages, encode_pages
from mmserve.model.cuda_layer import CUDALayer
from mmserve.request import BeamParams, SamplingParams, Segment, TextSegment
from mmserve.scheduler.open_pages import most_open
from tests.engine.driver import GREEDY, Driver, picture, tiny_driver, words
from tests.engine.test_beam_laws import DIVERSE, WIDE, check
from tests.engine.test_cuda_runner import DEVICE, on_the_gpus_runner
from tests.engine.test_drafting import PARAMS, Guesses, compare, segments
from tests.engine.test_streaming import CROWD, assert_anew
from tests.engine.test_windows import KINDS, windowed_model
from tests.engine.tiny import tiny_config, tiny_model
from tests.model.dense import dense_logits, embed

NAMES = ["int4", "int2_outliers"]
PAGE = 16
LONG = replace(GREEDY, max_tokens=40, ignore_eos=True)


def driver(name: str, *, overlaps: bool = False, **options: Any) -> Driver:
    """8-bit weights on a CPU: the same bits in any company."""
    formats = {"text_format": name, "vision_format": "int4"}
    return tiny_driver(overlaps, **{"dtype": "int8", **formats, **options})


# -- PAGED = DENSE --------------------------------------------------------------------------------


class Stored:
    """Plain attention over a whole sequence, as if it read pages."""

    def __init__(self, kind: KVFormat) -> None:
        self.kind = kind
        self.is_text = torch.zeros(0, dtype=torch.bool)

    def _stored(self, x: Tensor, part: Part) -> Tensor:
        """x [Hkv, T, D] with its whole pages of text as they come back."""
        text, found = x[:, self.is_text], x.clone()
        count = text.shape[1] // PAGE
        pages = text[:, : count * PAGE].reshape(len(x), count, PAGE, -1)
        held = torch.full(pages.shape[:2], PAGE)
        tiles = encode_pages(pages, held, self.kind, part)
        back = decode_pages(tiles, self.kind, part, PAGE, x.shape[2])
        where = self.is_text.nonzero()[: count * PAGE, 0]
        found[:, where] = back.flatten(1, 2)
        return found

    def __call__(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        group = q.shape[1] // k.shape[1]
        page = (self.is_text.cumsum(0) - self.is_text.int()) // PAGE
        out = torch.zeros_like(q[0])
        for own in range(int(page.max()) + 1):
            old = (page < own) & self.is_text
            keys = torch.where(old[:, None], self._stored(k[0], "k"), k[0])
            values = torch.where(old[:, None], self._stored(v[0], "v"), v[0])
            keys, values = (x.repeat_interleave(group, 0) for x in (keys, values))
            rows = page == own
            scores = q[0][:, rows] @ keys.transpose(1, 2) * scaling + mask[0, 0, rows]
            out[:, rows] = scores.softmax(-1) @ values
        return out.transpose(0, 1)[None], None


@pytest.fixture(params=NAMES)
def stored(request: pytest.FixtureRequest) -> Iterator[Stored]:
    made = Stored(FORMATS[request.param])
    AttentionInterface.register("sdpa", made)
    yield made
    AttentionInterface.register("sdpa", ORIGINAL)


ORIGINAL = AttentionInterface()["sdpa"]


@pytest.mark.parametrize("budget", [7, 64])
@pytest.mark.parametrize("parts", [(50,), (9, "a", 30, "b", 25), ("a", 16, "b", 32)])
def test_paged_equals_dense(stored: Stored, parts: tuple[int | str, ...], budget: int) -> None:
    check_dense(stored, parts, budget, LONG, 1e-4)


@pytest.mark.parametrize(
    ("stored", "budget", "fused"), [("int4", 20, True), ("int2", 64, False)], indirect=["stored"]
)
def test_paged_equals_dense_on_the_gpus_runner(
    stored: Stored, budget: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that ends inside a page, or one of several pages, and then a row that fills one. What
    is stored is read in 16 bits there."""
    monkeypatch.setattr(engine_module, "build_runner", on_the_gpus_runner)
    monkeypatch.setattr(tests.engine.driver, "build_tiny", on_the_device)
    if not fused:
        monkeypatch.setattr(CUDALayer, "fits", lambda layer: False)
    check_dense(stored, (9, "a", 20), budget, replace(LONG, max_tokens=5), 2e-3)


def on_the_device(config: EngineConfig) -> Engine:
    return Engine(config, tiny_model(device=DEVICE))


def check_dense(
    stored: Stored, parts: tuple[int | str, ...], budget: int, params: SamplingParams, near: float
) -> None:
    """But for levels that the last bits of what is stored move by one. `near`: a part of how far
    logits lie apart."""
    options: dict[str, Any] = {"dtype": "float32", "vision_format": "auto"}
    d = driver(stored.kind.name, max_num_batched_tokens=budget, **options)
    prompt: tuple[Segment, ...] = tuple(
        d.image(picture(ord(part))) if isinstance(part, str) else words(i, part)
        for i, part in enumerate(parts)
    )
    request = d.submit(prompt, params)
    d.run()
    d.assert_idle()
    model = tiny_model()
    model.lm.config._attn_implementation = "sdpa"
    embeddings, image_of = embed(model, (*prompt, TextSegment(tuple(d.tokens(request)[:-1]))))
    stored.is_text = torch.tensor(image_of) == 0
    expected = dense_logits(model, embeddings, image_of)[-len(d.tokens(request)) :]
    error = (torch.stack(d.logits[request]).cpu() - expected).abs().amax(1)
    assert float(error.median()) < near * float(expected.std())
    assert float(error.max()) < 0.1 * float(expected.std())


# -- whatever is computed when --------------------------------------------------------------------


@given(
    st.lists(st.sampled_from([1, 15, 16, 17, 31, 33, 60]), min_size=2, max_size=3),
    st.integers(1, 40),
    st.sampled_from([9, 30]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=5, deadline=None)
def test_chunks_company_pressure_hits_and_launching_ahead_change_no_bit(
    lengths: list[int], budget: int, text_pages: int, overlaps: bool, prefix_caching: bool
) -> None:
    def prompt(d: Driver, n: int) -> tuple[Segment, ...]:
        return (words(0, lengths[n]), d.image(picture(n)), words(n, 20))

    quiet = driver("int4", prefix_caching=False)
    alone = [quiet.ask(*prompt(quiet, n), params=LONG) for n in range(len(lengths))]
    few = -(-text_pages * 64 // 100)  # a page takes a fifth or so of one as the model computes it
    d = driver(
        "int4",
        overlaps=overlaps,
        prefix_caching=prefix_caching,
        text_pages=few,
        max_num_batched_tokens=budget,
    )
    for _ in range(2):
        sent = [d.submit(prompt(d, n), LONG) for n in range(len(lengths))]
        d.run()
        for mine, theirs in zip(sent, alone, strict=True):
            assert d.tokens(mine) == theirs
    d.assert_idle()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("beams", [WIDE, DIVERSE])
def test_beams_copy_the_page_that_is_open(name: str, beams: BeamParams) -> None:
    for parts in ((30, "a", 9), (16,), (7, "a", 8)):
        check(lambda: driver(name, max_num_batched_tokens=20), parts, beams, 12)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_cut_equals_asked_anew(overlaps: bool) -> None:
    plain = driver("int4", prefix_caching=False)
    d = driver("int4", overlaps=overlaps, text_pages=4, vision_pages=8, max_num_batched_tokens=7)
    assert_anew(plain, d, CROWD)


@pytest.mark.parametrize("kind", KINDS)
def test_windows_give_the_same_however_the_prompt_was_cut(kind: str) -> None:
    answers = []
    for budget in (5, 64):
        config = tiny_config(text_format="int4", max_num_batched_tokens=budget)
        d = Driver(Engine(config, windowed_model(KINDS[kind])))
        first = (words(1, 50), d.image(picture(1)), words(2, 30))
        answers += [d.ask(*first, params=LONG) for _ in range(2)]
        d.assert_idle()
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("skill", [0.3, 0.9])
def test_drafts_that_fill_a_page_and_are_wrong_leave_nothing(skill: float) -> None:
    plain, assisted = driver("int4"), driver("int4", text_pages=12)
    asks = [((n + 9, "a", 5), PARAMS["greedy"]) for n in range(3)] + [((31,), PARAMS["sampled"])]
    assert compare(plain, assisted, asks, Guesses(skill, length=20)).right > 0
    assisted.engine.drafting = None
    for n, (parts, params) in enumerate(asks):
        said = plain.tokens(str(n))
        longer = (*segments(assisted, parts, n), TextSegment(tuple(said)), words(n, 9))
        cold = driver("int4").ask(*longer, params=params)
        assert assisted.ask(*longer, params=params) == cold, "what drafts have left was found"


def test_as_many_pages_are_open_as_a_step_can_need_and_no_more() -> None:
    d = driver("int4", max_num_seqs=3, max_num_batched_tokens=40)
    pool = d.engine.scheduler.holdings.open_pages.pool
    assert pool is not None and pool.num_pages == most_open(PAGE, 3, 40) == 9
    plain = driver("int4")
    asks = [((33 + 9 * n,), LONG) for n in range(8)]
    assert compare(plain, d, asks, Guesses(0.5, length=33)).right > 0
    d.assert_idle()


def test_layers_left_out_have_no_residual() -> None:
    d = driver("int2", skip_layers=(1,))
    assert [group.residual for group in d.engine.runner.groups] == [True, False]
    assert [pool.residual is None for pool in d.engine.runner.text] == [False, True]
    cold = driver("int2", skip_layers=(1,), max_num_batched_tokens=9)
    prompt = (words(1, 40), d.image(picture(1)), words(2, 30))
    expected = cold.ask(*prompt, params=LONG)
    assert d.ask(*prompt, params=LONG) == d.ask(*prompt, params=LONG) == expected

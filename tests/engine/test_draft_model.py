"""A second model that drafts: what it guesses, what it holds, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from mmserve.engine.draft_model import DraftModel, check_vocabulary
from mmserve.engine.engine import Engine
from mmserve.request import SamplingParams, TextSegment
from mmserve.spec.draft_model import Extension, ModelDrafter
from mmserve.spec.drafter import Context, Landed, Wanted
from mmserve.spec.head_files import HeadError
from tests.engine.driver import Driver, tiny_driver, words
from tests.engine.tiny import tiny_config, tiny_model, tiny_tokenizer


def tiny_draft_model(text_pages: int = 200) -> DraftModel:
    """The very model that the tests' engines serve."""
    runner = Engine(tiny_config(text_pages=text_pages), tiny_model()).runner
    return DraftModel(runner, 259, 512)


def free(model: DraftModel) -> int:
    return model._runner.text[0].pages.num_free


def greedy(driver: Driver, tokens: list[int], count: int) -> list[int]:
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    return driver.ask(TextSegment(tuple(tokens)), params=params)


@settings(max_examples=10)
@given(st.data())
def test_it_says_what_the_model_says_wherever_its_guesses_went_wrong(data: st.DataObject) -> None:
    driver, model = tiny_driver(), tiny_draft_model()
    drafter, whole = ModelDrafter(model), free(model)
    texts = [list(words(seed, 5 + 20 * seed).token_ids) for seed in range(3)]
    contexts = [Context(str(i), text, len(text)) for i, text in enumerate(texts)]
    for _ in range(4):
        wants = [Wanted(c, data.draw(st.integers(0, 4))) for c in contexts]
        for want, draft in zip(wants, drafter.propose(wants), strict=True):
            tokens = [] if draft is None else list(draft.tokens)
            assert len(tokens) == want.length
            known = list(want.context.token_ids)
            assert not tokens or tokens == greedy(driver, known, want.length)
            right = data.draw(st.integers(0, len(tokens)))
            texts[int(want.context.id)] += [*tokens[:right], data.draw(st.integers(3, 258))]
    for context in contexts:
        drafter.end(context)
        drafter.end(context)
    assert free(model) == whole


def test_a_long_prompt_is_read_while_it_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmserve.spec.draft_model.PART", 16)
    driver, model = tiny_driver(), tiny_draft_model()
    drafter = ModelDrafter(model)
    tokens = list(words(1, 50).token_ids)
    context = Context("a", tokens, 50)
    assert drafter.propose([Wanted(context, 2)]) == [None]  # takes in a part
    for _ in range(2):
        drafter.landed(context, Landed(None, (), ()))
    (draft,) = drafter.propose([Wanted(context, 2)])
    assert draft is not None and list(draft.tokens) == greedy(driver, tokens, 2)


def test_where_pages_run_out_others_are_still_drafted_for() -> None:
    driver, model = tiny_driver(), tiny_draft_model(text_pages=4)
    drafter = ModelDrafter(model)
    short, long = list(words(1, 10).token_ids), list(words(2, 80).token_ids)
    wants = [Wanted(Context("long", long, 1), 3), Wanted(Context("short", short, 1), 3)]
    for _ in range(2):
        none, draft = drafter.propose(wants)
        assert none is None
        assert draft is not None and list(draft.tokens) == greedy(driver, short, 3)
    drafter.end(wants[0].context)
    drafter.end(wants[1].context)
    assert free(model) == 4


def test_a_text_is_not_drafted_beyond_what_the_model_can_hold() -> None:
    model = tiny_draft_model()
    model.longest = 12
    context = Context("a", list(words(1, 10).token_ids), 1)
    drafter = ModelDrafter(model)
    assert drafter.propose([Wanted(context, 3)]) == [None]
    assert drafter.propose([Wanted(context, 2)]) != [None]


def test_a_text_that_is_shortened_to_nothing_begins_anew() -> None:
    model = tiny_draft_model()
    tokens = words(3, 20).token_ids
    (first,) = model.extend([Extension("a", tokens)])
    model.shorten("a", 0)
    assert free(model) == 200
    assert model.extend([Extension("a", tokens)]) == [first]


def test_other_vocabularies_are_refused_with_the_token_that_differs() -> None:
    other: Any = Tokenizer(models.BPE({"<|endoftext|>": 0, "b": 1}, []))
    with pytest.raises(HeadError, match=r"small cannot draft for large: token .* is number"):
        check_vocabulary(other, tiny_tokenizer(), "small", "large")
    check_vocabulary(tiny_tokenizer(), tiny_tokenizer(), "small", "large")

"""EAGLE's head in its two public layouts, and the drafter around it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmserve.spec.draft import MOST_TOKENS, Draft, Unread
from mmserve.spec.drafter import Wanted
from mmserve.spec.eagle import EagleHead, load_eagle
from mmserve.spec.eagle_drafter import EagleDrafter
from mmserve.spec.head_files import HeadError, read_head, write_head
from mmserve.train_drafter.corpus import Batch
from mmserve.train_drafter.unroll import TrainedEagle
from tests.spec.heads import HIDDEN, VOCAB, context, parts, random_eagle, saved_eagle, told

PARTS = parts()


def features(count: int, head: EagleHead, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, HIDDEN * len(head.config.taps), generator=generator)


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (count,), generator=generator).tolist()


def dense(head: EagleHead, known: list[int], states: Tensor, length: int, window: int) -> list[int]:
    """The chain behind `known`, from scratch for every token: each state by a whole pass over what
    is known, and the guesses so far, as if they were."""
    chain: list[int] = []
    for step in range(length):
        ids = torch.tensor([[*known, *chain, 0]])
        padded = torch.zeros(1, ids.shape[1], states.shape[1])
        padded[0, : len(states)] = states
        batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), padded, padded[..., :HIDDEN])
        trained = TrainedEagle(head, PARTS.embed, window)
        found = trained.states(batch, step + 1)[step][0, len(known) - 2]
        best = PARTS.logits(found).argmax(-1)
        chain.append(int(head.named(best)))
    return chain


@pytest.mark.parametrize("third", [False, True])
def test_a_public_checkpoint_is_loaded_whole(tmp_path: Path, third: bool) -> None:
    further = {"embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}
    if third:
        further["lm_head.weight"] = torch.randn(20, HIDDEN)
    head = saved_eagle(tmp_path, third, **further)
    assert head.config.third is third
    assert head.config.taps == ((1, 3, 4) if third else (-1,))
    numbers = torch.arange(20)
    assert head.named(numbers).tolist() == (list(range(3, 43, 2)) if third else list(range(20)))
    state = torch.randn(2, HIDDEN)
    if third:
        want = torch.nn.functional.rms_norm(state, (HIDDEN,), head.norm.weight, 1e-5)
        assert torch.allclose(head.scores(state), want @ further["lm_head.weight"].T, atol=1e-5)
    else:
        assert torch.equal(head.scores(state), PARTS.logits(state))


def test_without_a_matrix_of_its_own_the_models_rows_are_scored(tmp_path: Path) -> None:
    head = saved_eagle(tmp_path, third=True)
    state = torch.randn(3, HIDDEN)
    normed = head.norm(state)
    assert head.ids is not None
    assert torch.allclose(head.scores(state), PARTS.logits(normed)[:, head.ids], atol=1e-5)


def test_a_head_of_another_model_or_of_another_layout_is_refused(tmp_path: Path) -> None:
    saved_eagle(tmp_path, third=True)
    wider = dataclasses.replace(PARTS, hidden_size=64)
    with pytest.raises(HeadError, match="hidden size is 32, the model's 64"):
        load_eagle(read_head(tmp_path), wider)
    file = read_head(tmp_path)
    with pytest.raises(HeadError, match="guesses tokens that are not there"):
        load_eagle(file, dataclasses.replace(PARTS, vocab_size=30))
    del file.tensors["fc.weight"]
    with pytest.raises(HeadError, match=r"has no fc\.weight"):
        load_eagle(file, PARTS)
    two = saved_eagle(tmp_path / "two", third=False)
    extra = {"layers.1.mlp.up_proj.weight": torch.zeros(2, 2)}
    write_head(tmp_path / "two", two.config.as_json(), {**file.tensors, **extra})
    with pytest.raises(HeadError):
        load_eagle(read_head(tmp_path / "two"), PARTS)


@pytest.mark.parametrize("third", [False, True])
@settings(max_examples=15)
@given(st.integers(2, 40), st.integers(1, 5), st.integers(5, 12), st.data())
def test_chains_are_those_of_a_whole_pass_however_the_text_came(
    third: bool, count: int, length: int, window: int, data: st.DataObject
) -> None:
    head = _scoring(random_eagle(third).requires_grad_(False))
    drafter = EagleDrafter(head, PARTS, window=window)
    known, states = tokens(count), features(count - 1, head)
    who, at = context("a", known[:1]), 0
    while at < count - 1:
        end = data.draw(st.integers(at + 1, count - 1))
        who = context("a", known[: end + 1])
        drafter.landed(who, told(at, states[at:end]))
        at = end
        if data.draw(st.booleans()):  # guesses in between leave nothing behind
            drafter.propose([Wanted(who, 3)])
    (draft,) = drafter.propose([Wanted(who, length)])
    assert draft is not None
    assert list(draft.read().tokens) == dense(head, known, states, length, window)


def _scoring(head: EagleHead) -> EagleHead:
    """With the model's whole vocabulary."""
    head.score = PARTS.logits
    return head


def chances(head: EagleHead, known: list[int], states: Tensor, line: list[int]) -> Tensor:
    """[VOCAB] logarithms: what follows `known` and the guesses `line`."""
    ids = torch.tensor([[*known, *line, 0]])
    padded = torch.zeros(1, ids.shape[1], states.shape[1])
    padded[0, : len(states)] = states
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), padded, padded[..., :HIDDEN])
    trained = TrainedEagle(head, PARTS.embed, 64)
    found = trained.states(batch, len(line) + 1)[-1][0, len(known) - 2]
    return PARTS.logits(found).log_softmax(-1)


@pytest.mark.parametrize("third", [False, True])
def test_a_trees_lines_are_the_likeliest_by_whole_passes(
    third: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmserve.spec.eagle_drafter.BRANCHES", 3)
    head = _scoring(random_eagle(third).requires_grad_(False))
    drafter = EagleDrafter(head, PARTS, most=12, window=64)
    wants, texts = [], {}
    for number, count in enumerate((9, 30)):
        known, states = tokens(count, number), features(count - 1, head, number)
        who = context(str(number), known)
        drafter.landed(who, told(0, states))
        wants.append(Wanted(who, 3))
        texts[who.id] = (known, states)
    for (who, _), draft in zip(wants, drafter.propose(wants), strict=True):
        known, states = texts[who.id]
        assert draft is not None and len(draft) == 12
        level, every = [(0.0, list[int]())], []
        for _ in range(3):  # three children of each of the three likeliest
            grown = []
            for cost, line in level:
                best = chances(head, known, states, line).topk(3)
                pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
                grown += [(cost + chance, [*line, token]) for chance, token in pairs]
            every += grown
            level = sorted(grown, reverse=True)[:3]
        every.sort(key=lambda each: each[0] - 1e-3 * len(each[1]), reverse=True)
        assert {tuple(path) for path in draft.read().paths} == {
            tuple(line) for _, line in every[:12]
        }


class Replayed:
    """Does again what it was told the first time, as a device that captured it would."""

    enabled = True

    def __init__(self) -> None:
        self.made: dict[Hashable, Callable[[], Tensor]] = {}

    def run(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        return self.made.setdefault(key, compute)()

    def clear(self) -> None:
        self.made.clear()


@pytest.mark.parametrize("most", [0, 9])
def test_captured_drafts_are_those_that_are_launched(most: int) -> None:
    head = _scoring(random_eagle(True).requires_grad_(False))
    replayed = dataclasses.replace(PARTS, captures=Replayed())
    drafters = [EagleDrafter(head, p, most=most, window=16) for p in (PARTS, replayed)]
    texts = [tokens(40 + number, number) for number in range(6)]
    states = [features(60, head, number) for number in range(6)]
    at = [0] * 6
    for step, count in enumerate((1, 3, 3, 6, 2, 5, 6)):
        wants = []
        for number in range(count):
            end = min(at[number] + (9, 1, 3)[(step + number) % 3], 38)
            who = context(str(number), texts[number][: end + 1])
            for drafter in drafters:
                drafter.landed(who, told(at[number], states[number][at[number] : end]))
            wants.append(Wanted(who, 5))
            at[number] = end
        plain, captured = (drafter.propose(wants) for drafter in drafters)
        assert plain == captured and None not in plain


def test_what_was_rehearsed_is_there_when_it_is_asked_for() -> None:
    head = _scoring(random_eagle(True).requires_grad_(False))
    captures = Replayed()
    rehearsed = EagleDrafter(head, dataclasses.replace(PARTS, captures=captures), most=9)
    rehearsed.rehearse(5)
    made, drafters = set(captures.made), [EagleDrafter(head, PARTS, most=9), rehearsed]
    wants = []
    for number in range(3):
        who, states = context(str(number), tokens(30, number)), features(29, head, number)
        for drafter in drafters:
            drafter.landed(who, told(0, states))
        wants.append(Wanted(who, 5))
    plain, captured = (drafter.propose(wants) for drafter in drafters)
    assert plain == captured and None not in plain
    assert set(captures.made) == made


@pytest.mark.parametrize("most", [0, 9])
def test_drafts_stand_on_the_device_before_anybody_has_read_them(most: int) -> None:
    head = _scoring(random_eagle(True).requires_grad_(False))
    grown = torch.full((4, 3 * MOST_TOKENS), -7, dtype=torch.int32)
    captured = dataclasses.replace(PARTS, captures=Replayed(), grown=grown)
    drafters = [EagleDrafter(head, p, most=most, window=16) for p in (PARTS, captured)]
    wants = []
    for number in range(2):
        who, states = context(str(number), tokens(9, number)), features(8, head, number)
        for drafter in drafters:
            drafter.landed(who, told(0, states))
        wants.append(Wanted(who, 5))
    known, unread = (drafter.propose(wants) for drafter in drafters)
    for want, got in zip(known, unread, strict=True):
        assert isinstance(want, Draft) and isinstance(got, Unread)
        assert got.read() == want and (len(got), got.length) == (len(want), 5)
        drawn, depths, low, high = grown[:, got.place : got.place + len(got)].tolist()
        assert (tuple(drawn), tuple(depths)) == (want.tokens, want.depths)
        masks = [(b << 32) + (a & 0xFFFFFFFF) for a, b in zip(low, high, strict=True)]
        assert masks == list(want.masks)
    assert (grown[:, 2 * MOST_TOKENS :] == -7).all()


@pytest.mark.parametrize("third", [False, True])
def test_company_changes_no_guess(third: bool) -> None:
    head = _scoring(random_eagle(third).requires_grad_(False))
    many, wants, alone = EagleDrafter(head, PARTS, window=8), [], []
    for number, count in enumerate((3, 17, 9, 30)):
        who, states = context(str(number), tokens(count, number)), features(count - 1, head, number)
        many.landed(who, told(0, states))
        wants.append(Wanted(who, 4))
        lonely = EagleDrafter(head, PARTS, window=8)
        lonely.landed(who, told(0, states))
        alone += lonely.propose([Wanted(who, 4)])
    assert many.propose(wants) == alone


def test_what_came_from_a_cache_is_done_without() -> None:
    head = _scoring(random_eagle(True).requires_grad_(False))
    known, states = tokens(20), features(19, head)
    late, short = EagleDrafter(head, PARTS, window=64), EagleDrafter(head, PARTS, window=7)
    who = context("a", known)
    late.landed(who, told(12, states[12:]))
    short.landed(who, told(0, states))
    assert late.propose([Wanted(who, 1)]) == short.propose([Wanted(who, 1)])


def test_nothing_is_guessed_where_the_last_tokens_are_not_known() -> None:
    head = _scoring(random_eagle(True).requires_grad_(False))
    drafter = EagleDrafter(head, PARTS, window=8)
    who = context("a", tokens(9))
    assert drafter.propose([Wanted(who, 3)]) == [None]
    drafter.landed(who, told(0, features(6, head)))
    assert drafter.propose([Wanted(who, 3)]) == [None]
    drafter.landed(who, told(6, features(2, head)))
    assert drafter.propose([Wanted(who, 0)]) == [None]
    (draft,) = drafter.propose([Wanted(who, 3)])
    assert draft is not None and len(draft) == 3
    assert drafter.propose([Wanted(who, 3)]) == [draft]


def test_an_ended_sequence_leaves_its_ring_to_the_next() -> None:
    head = _scoring(random_eagle(True).requires_grad_(False))
    used, fresh = EagleDrafter(head, PARTS, window=8), EagleDrafter(head, PARTS, window=8)
    for number in range(12):  # more than there are rings, had they not been given back
        old = context(str(number), tokens(30, number))
        used.landed(old, told(0, features(29, head, number)))
        used.propose([Wanted(old, 5)])
        used.end(old)
        used.end(old)  # nothing is known of it by now
    assert len(used._kv.rings) <= 5
    who, states = context("new", tokens(4)), features(3, head)
    for drafter in (used, fresh):
        drafter.landed(who, told(0, states))
    assert used.propose([Wanted(who, 4)]) == fresh.propose([Wanted(who, 4)])

"""A draft tree's rows are what the target would have said behind each path, alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mmserve.engine import engine as engine_module
from mmserve.engine.drafting import Drafting
from mmserve.engine.engine import Engine
from mmserve.engine.kept_paths import Keeping, KeptPath
from mmserve.request import Segment, TextSegment
from mmserve.scheduler.batch import Batch, Chunk
from mmserve.spec.draft import MOST_TOKENS, AnyDraft, Draft, Unread
from mmserve.spec.drafter import Wanted
from mmserve.spec.eagle_tree import planted
from tests.engine.driver import GREEDY, Driver, picture, words
from tests.engine.guessing import Guesser
from tests.engine.test_cuda_runner import DEVICE, on_the_gpus_runner
from tests.engine.test_drafting import Guesses, compare
from tests.engine.test_windows import KINDS, WINDOW, windowed_model
from tests.engine.tiny import build_tiny, tiny_config, tiny_model

ONE = replace(GREEDY, max_tokens=1)
# Two long branches that alternate, and short ones beside them; over a page's border in any case.
PARENTS = (-1, -1, 0, 1, 2, 3, 4, -1, 5, 6, 2, 8, 9, 11, 12, 13, 14, 16)
DRAFT = Draft(tuple(range(40, 40 + len(PARENTS))), PARENTS)
PROMPTS = {"text": (30,), "images": (9, "a", 12, "b", 4), "an image last": (17, "a")}


def segments(d: Driver, parts: tuple[int | str, ...]) -> tuple[Segment, ...]:
    return tuple(
        d.image(picture(ord(part))) if isinstance(part, str) else words(i, part)
        for i, part in enumerate(parts)
    )


def behind(d: Driver, prompt: tuple[Segment, ...], tokens: tuple[int, ...]) -> Tensor:
    """Logits behind a prompt and these tokens, without any draft."""
    request = d.submit((*prompt, TextSegment(tokens)), ONE)
    d.run()
    return d.logits[request][-1]


def numbers(leaf: int) -> list[int]:
    """The path down to a leaf."""
    return [*(numbers(PARENTS[leaf]) if PARENTS[leaf] >= 0 else ()), leaf]


def check(drivers: list[Driver], parts: tuple[int | str, ...], tolerance: float) -> None:
    """On one engine the rows of the tree, and then of the token behind each path once it is text;
    on the other the same tokens without drafts."""
    d, plain = drivers
    prompt = (*segments(d, parts), TextSegment((7,)))
    for leaf in range(len(DRAFT)):
        request = d.submit(prompt, replace(ONE, max_tokens=2, ignore_eos=True))
        while not d.tokens(request):
            d.step()
        seq, holdings = d.engine._live[request].seq, d.engine.scheduler.holdings
        known, runner = seq.num_prompt_tokens, d.engine.runner
        seq.token_ids[known - 1 :] = [7]  # as if its answer were not known yet
        assert holdings.grow(seq, known + len(DRAFT)) is not None
        logits = runner.run(Batch([Chunk(seq, known - 1, 1, True, draft=DRAFT)]))
        assert logits is not None and len(logits.values) == 1 + len(DRAFT)
        path = numbers(leaf)
        told = tuple(DRAFT.tokens[n] for n in path)
        alone = behind(plain, prompt, told)
        torch.testing.assert_close(logits.values[1 + leaf], alone, rtol=0, atol=tolerance)

        keeping = Keeping(runner.text, runner.move)
        keeping.add(KeptPath(seq.tables, known, path))
        keeping.settle()
        seq.token_ids += [*told, 9]
        logits = runner.run(Batch([Chunk(seq, known + len(path), 1, True)]))
        assert logits is not None
        wanted = behind(plain, prompt, (*told, 9))
        torch.testing.assert_close(logits.values[0], wanted, rtol=0, atol=tolerance)
        del seq.token_ids[known:]
        d.abort(request)


@pytest.mark.parametrize("name", PROMPTS)
def test_every_row_has_the_bits_of_its_path_alone(name: str) -> None:
    """With 8-bit weights, whose products are exact whatever the company."""
    options = tiny_config(dtype="int8", prefix_caching=False)
    check([Driver(build_tiny(options)) for _ in range(2)], PROMPTS[name], 0.0)


def test_the_gpus_runner_answers_as_the_plain_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, where there is no GPU. Several sequences, of which one has no draft at times."""
    params = replace(GREEDY, max_tokens=9, ignore_eos=True)
    plain = Driver(Engine(tiny_config(), tiny_model()))
    monkeypatch.setattr(engine_module, "build_runner", on_the_gpus_runner)
    drafted = Driver(Engine(tiny_config(), tiny_model(device=DEVICE)))
    asks = [(PROMPTS["images"], params), (PROMPTS["an image last"], params)]
    guesser = compare(plain, drafted, asks, Guesses(0.8, 5, branches=2))
    assert guesser.right > 5


class Unseen:
    """Another's drafts, of which the engine is told no more than where they stand."""

    taps = ()

    def __init__(self, guesser: Guesser, grown: Tensor) -> None:
        self.name, self._guesser, self._grown = guesser.name, guesser, grown
        self.landed, self.end = guesser.landed, guesser.end
        self.unseen = 0

    def propose(self, wanted: Sequence[Wanted]) -> list[AnyDraft | None]:
        drafts = self._guesser.propose(wanted)
        return [draft and self._plant(n, draft) for n, draft in enumerate(drafts)]

    def _plant(self, number: int, draft: Draft) -> Unread:
        place = number * MOST_TOKENS
        grown = torch.tensor([draft.tokens, draft.parents])[None]
        length = max(draft.depths)
        self._grown[:, place : place + len(draft)] = planted(grown, length)[:, 0]
        self.unseen += 1
        return Unread(len(draft), length, place, lambda: draft)


@pytest.mark.parametrize("branches", [0, 2])
def test_drafts_that_only_the_device_has_seen_change_no_answer(
    monkeypatch: pytest.MonkeyPatch, branches: int
) -> None:
    """One of the sequences is sampled, so that its drafts have to be read first."""
    params = replace(GREEDY, max_tokens=9, ignore_eos=True)
    plain = Driver(Engine(tiny_config(), tiny_model()))
    monkeypatch.setattr(engine_module, "build_runner", on_the_gpus_runner)
    drafted = Driver(Engine(tiny_config(), tiny_model(device=DEVICE)))
    asks = [(PROMPTS["images"], params), (PROMPTS["text"], replace(params, temperature=1, seed=3))]
    for parts, how in asks:
        plain.submit(segments(plain, parts), how)
    plain.run()
    answers = {request: plain.tokens(request) for request in plain.events}
    engine = drafted.engine
    assert engine.runner.grown is not None
    unseen = Unseen(Guesser(answers, 0.8, 3, branches), engine.runner.grown)
    books = engine.scheduler.holdings, engine.metrics
    engine.drafting = Drafting(unseen, 5, *books)
    for parts, how in asks:
        drafted.submit(segments(drafted, parts), how)
    drafted.run()
    assert {request: drafted.tokens(request) for request in drafted.events} == answers
    assert unseen.unseen > 3 and unseen._guesser.right > 3
    drafted.assert_idle()


@pytest.mark.parametrize("kind", KINDS)
def test_windows_end_on_the_path(kind: str) -> None:
    assert max(DRAFT.depths) < WINDOW
    config = tiny_config(prefix_caching=False)
    drivers = [Driver(Engine(config, windowed_model(KINDS[kind]))) for _ in range(2)]
    check(drivers, PROMPTS["images"], 2e-3)

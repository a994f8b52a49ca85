"""Two ranks answer as one process does: known prefixes, images, drafts, beams.

On the CPU, with gloo. Ranks take seconds to start, so that the tests share them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmserve.config import EngineConfig, TierConfig
from mmserve.engine import ranks
from mmserve.engine.async_engine import AsyncEngine
from mmserve.engine.ranks import parallel_engine
from mmserve.errors import KVRefusedError
from mmserve.request import BeamParams, Constraint, FinishReason, SamplingParams, Segment
from tests.engine import recipes
from tests.engine.driver import GREEDY, Driver, picture, words
from tests.engine.test_async_engine import run
from tests.engine.test_drafting import Guesses, assist
from tests.engine.tiny import build_tiny, tiny_config

TWO = replace(tiny_config(max_num_batched_tokens=48), tensor_parallel_size=2)
SAMPLED = SamplingParams(max_tokens=8, temperature=1.0, seed=5)


def started(recipe: Any = recipes.tiny, config: EngineConfig = TWO) -> Driver:
    return Driver(parallel_engine(config, recipe))


@pytest.fixture(scope="module")
def two() -> Iterator[Driver]:
    driver = started()
    yield driver
    driver.engine.close()


@pytest.fixture
def one() -> Driver:
    return Driver(build_tiny(replace(TWO, tensor_parallel_size=1)))


def asks(driver: Driver) -> dict[str, tuple[Segment, ...]]:
    first, second, third = (driver.image(picture(seed)) for seed in (1, 2, 3))
    return {
        "text": (words(1, 70),),
        "an image": (words(2, 9), first, words(3, 5)),
        "three images": (first, words(4, 4), second, third, words(5, 6)),
        "a known beginning": (words(1, 70), words(6, 8)),
        "known images elsewhere": (words(7, 30), third, first, words(8, 3)),
    }


def check(one: Driver, two: Driver) -> None:
    """Alone, then together, when prefixes and images are known."""
    for params in (GREEDY, SAMPLED):
        alone = [[d.ask(*parts, params=params) for parts in asks(d).values()] for d in (one, two)]
        assert alone[0] == alone[1]
    crowds = []
    for driver in (one, two):
        requests = [driver.submit(parts) for parts in asks(driver).values()]
        driver.run()
        crowds.append([driver.tokens(request) for request in requests])
        usage = driver.last(requests[-1]).usage
        assert usage is not None and usage.cached_tokens > 0 and usage.vision_misses == 0
        driver.assert_idle()
    assert crowds[0] == crowds[1]


def test_tokens_are_those_of_one_process(one: Driver, two: Driver) -> None:
    check(one, two)
    assert one.counts() == two.counts()
    mine, whole = two.engine.runner.text[0].tensor, one.engine.runner.text[0].tensor
    assert mine.shape[2] * 2 == whole.shape[2], "each rank holds half of the heads"


def test_drafts_and_trees_of_them_change_nothing(one: Driver, two: Driver) -> None:
    parts = {name: asks(one)[name] for name in ("text", "an image")}
    long = replace(GREEDY, max_tokens=24)
    wanted = [one.ask(*each, params=long) for each in parts.values()]
    last = len(two.events)
    answers = {str(last + number): tokens for number, tokens in enumerate(wanted)}
    guesser = assist(two, answers, Guesses(0.8, 6, branches=2))
    two._ids = map(str, range(last, last + 100))
    try:
        requests = [two.submit(asks(two)[name], long) for name in parts]
        two.run()
    finally:
        two.engine.drafting = None
    assert [two.tokens(request) for request in requests] == wanted
    assert guesser.right > 8
    two.assert_idle()


def test_beams_share_and_copy_pages_on_every_rank(one: Driver, two: Driver) -> None:
    params = replace(GREEDY, max_tokens=10, beams=BeamParams(4, 4))
    found = []
    for driver in (one, two):
        request = driver.submit(asks(driver)["an image"], params)
        driver.run()
        found.append([c.token_ids for c in driver.last(request).choices])
    assert found[0] == found[1] and len(found[0]) == 4


def test_an_answer_keeps_to_its_grammar(one: Driver, two: Driver) -> None:
    params = replace(SAMPLED, max_tokens=40, constraint=Constraint("regex", "(ab|ba){6}"))
    found = [driver.ask(*asks(driver)["an image"], params=params) for driver in (one, two)]
    assert found[0] == found[1]
    text = one.engine.tokenizer.decode(found[0])
    assert re.fullmatch("(ab|ba){6}", text.removesuffix("<|im_end|>"))


def test_a_failure_of_a_tower_elsewhere_costs_its_own_request_alone(two: Driver) -> None:
    team: Any = two.engine.runner.team
    images = [two.image(picture(seed)) for seed in (21, 22)]
    for segment in images[1:]:  # the second image is the other rank's
        object.__setattr__(segment.image, "pixels", None)
        object.__setattr__(segment.image, "data", b"")
    doomed = two.submit((*images, words(9, 3)))
    two.run()
    assert two.last(doomed).finish_reason is FinishReason.ERROR
    assert len(two.ask(words(10, 5))) == 8 and not team.lost


def test_files_of_keys_and_values_are_refused(two: Driver) -> None:
    face: Any = AsyncEngine(TWO)
    face._engine = two.engine

    async def test() -> None:
        with pytest.raises(KVRefusedError, match="2 ranks"):
            await face.export_kv(Path("nowhere"))

    run(test)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (replace(TWO, tensor_parallel_size=4), "6 attention heads cannot be split over 4"),
        (replace(TWO, tensor_parallel_size=3), "2 heads of keys and values"),
        (replace(TWO, cache=replace(TWO.cache, cold_format="int8")), "--vision-kv-cold-dtype"),
        (replace(TWO, tiers=TierConfig(host_bytes=1 << 20)), "--host-kv-bytes"),
        (replace(TWO, model=replace(TWO.model, dtype="int8")), "--dtype int8"),
    ],
)
def test_what_cannot_be_had_is_refused_with_its_number(
    config: EngineConfig, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "start", nobody)
    with pytest.raises(ValueError, match=said):
        parallel_engine(config, recipes.tiny)


def nobody(*_: Any) -> Any:
    """No process at all."""
    from multiprocessing import Pipe

    from mmserve.engine.team import Pipes

    class Ended:
        def join(self, seconds: float = 0) -> None: ...

        def is_alive(self) -> bool:
            return False

    return Ended(), Pipes(Pipe()[0], Pipe()[0])

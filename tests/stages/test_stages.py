"""Encode, prefill and decode in three processes: the tokens of one, whatever becomes of the others.

Workers take long to start on a small machine, so that the tests share them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from mmserve.config import CacheConfig, EngineConfig, ModelConfig, StageConfig
from mmserve.engine import staging
from mmserve.engine.async_engine import AsyncEngine
from mmserve.engine.build_engine import build_engine
from mmserve.engine.engine import Engine
from mmserve.engine.ranks import refuse
from mmserve.engine.staging import Staging
from mmserve.handover.stages import Stages
from mmserve.request import SamplingParams, Segment
from mmserve.stages.workers import Place, StageWorkers
from tests.engine.driver import GREEDY, Driver, picture, words
from tests.engine.test_async_engine import collect, prompt, run, tokens
from tests.engine.test_vision_modes import CASES, segments
from tests.engine.tiny import build_tiny, tiny_config, tiny_model
from tests.model import families
from tests.stages import recipes

pytestmark = pytest.mark.slow

CONFIG = tiny_config(max_num_batched_tokens=48)  # so that a prompt takes several steps
SAMPLED = SamplingParams(max_tokens=8, temperature=1.0, seed=5)
START_S = 300.0


@pytest.fixture(scope="module")
def workers() -> Iterator[StageWorkers]:
    made = StageWorkers(CONFIG, recipes.tiny, [Place("encode"), Place("prefill")])
    made.start()
    yield made
    made.close()
    assert not any(process.is_alive() for process in made.processes.values())


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine this small, whether it pays depends on the weather."""
    monkeypatch.setattr(Staging, "pays", lambda *_: True)
    monkeypatch.setattr(Staging, "may_pay", lambda _: True)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


def stages_of(engine: Engine) -> Stages:
    assert engine.tiers is not None and engine.tiers.staging is not None
    return engine.tiers.staging.stages


def settle_costs(engine: Engine) -> Engine:
    """As if prompts had been computed before, at the speed of a large model."""
    engine.costs.token_s = engine.costs.image_token_s = 1.0
    engine.costs.computed = lambda *_: None  # type: ignore[method-assign]
    return engine


def alone(workers: StageWorkers, *kinds: str) -> EngineConfig:
    """Of a decoding engine that may ask these workers."""
    stages = workers.config.stages
    encode = stages.encode if "encode" in kinds else ()
    prefill = stages.prefill if "prefill" in kinds else ()
    return replace(workers.config, stages=StageConfig(encode, prefill, stages.key))


def driver(workers: StageWorkers, *kinds: str, build: Any = build_tiny) -> Driver:
    made = Driver(settle_costs(build(alone(workers, *kinds))))
    wait_until(lambda: stages_of(made.engine).ready)
    return made


def asks(d: Driver, seed: int) -> dict[str, tuple[Segment, ...]]:
    first, second, third = (d.image(picture(seed + i)) for i in range(3))
    return {
        "text": (words(seed, 200),),
        "an image": (words(seed + 1, 90), first, words(seed + 2, 60)),
        "several images": (second, words(seed + 3, 80), third, words(seed + 4, 90)),
        "a known beginning": (words(seed, 200), words(seed + 5, 70)),
        "known images elsewhere": (words(seed + 6, 70), third, first, words(seed + 7, 30)),
        "too little for a worker": (words(seed + 8, 20),),
    }


def figure(d: Driver, name: str, **labels: str) -> float:
    return d.engine.metrics._registry.get_sample_value(f"mmserve:{name}_total", labels) or 0.0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kinds", [("encode",), ("prefill",), ("encode", "prefill")])
def test_three_processes_give_the_tokens_of_one(
    workers: StageWorkers, kinds: tuple[str, ...], params: SamplingParams
) -> None:
    seed = 100 * len(kinds) + 10 * len(kinds[0])
    d, plain = driver(workers, *kinds), Driver(build_tiny(CONFIG))
    try:
        pairs = zip(asks(d, seed).items(), asks(plain, seed).values(), strict=True)
        for (name, there), here in pairs:
            assert d.ask(*there, params=params) == plain.ask(*here, params=params), name
        sent = [figure(d, "stage_choices", stage=kind) for kind in kinds]
        ended = [figure(d, "stage_jobs", stage=kind, end="done") for kind in kinds]
        assert sum(sent) == sum(ended) > 0 and figure(d, "stage_choices", stage="local") > 0
        assert d.counts()[0] == 0  # no image was looked at here
        if kinds == ("prefill",):
            computed = figure(d, "stage_moved_bytes", stage="prefill")
            assert computed and figure(d, "tier_hit_tokens", kind="text") >= 4 * 64
        d.assert_idle()
    finally:
        d.engine.close()


def test_requests_at_once_share_a_worker(workers: StageWorkers) -> None:
    d, plain = driver(workers, "prefill"), Driver(build_tiny(CONFIG))
    try:
        both = [[x.submit(parts) for parts in asks(x, 500).values()] for x in (d, plain)]
        for x in (d, plain):
            x.run()
        assert [d.tokens(r) for r in both[0]] == [plain.tokens(r) for r in both[1]]
        d.assert_idle()
    finally:
        d.engine.close()


def test_no_more_is_asked_for_than_may_be_held_beside_the_pools(
    workers: StageWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = driver(workers, "prefill")
    assert d.engine.tiers is not None
    monkeypatch.setattr(staging, "MOST_HELD", 5 * d.engine.tiers.lifter.run_bytes)
    try:
        for seed in range(4):  # of three runs each
            d.submit((words(650 + seed, 200),))
        assert figure(d, "stage_choices", stage="prefill") == 1
        d.run()
        d.ask(words(660, 200))  # what was held is not any more
        assert figure(d, "stage_choices", stage="prefill") == 2
        d.assert_idle()
    finally:
        d.engine.close()


def test_who_ends_while_a_worker_computes_leaves_nothing(workers: StageWorkers) -> None:
    d = driver(workers, "prefill")
    try:
        os.kill(workers.processes[1].pid, signal.SIGSTOP)
        request = d.submit((words(600, 200),))
        assert stages_of(d.engine).told()["prefill"]["jobs"] == 1
        d.abort(request)
        d.run()
        assert stages_of(d.engine).told()["prefill"]["jobs"] == 0
        d.assert_idle()
    finally:
        os.kill(workers.processes[1].pid, signal.SIGCONT)
        d.engine.close()


def test_a_worker_that_stands_still_costs_patience_and_no_request(workers: StageWorkers) -> None:
    d, plain = driver(workers, "prefill"), Driver(build_tiny(CONFIG))
    try:
        os.kill(workers.processes[1].pid, signal.SIGSTOP)
        assert d.ask(words(700, 200)) == plain.ask(words(700, 200))
        assert figure(d, "stage_jobs", stage="prefill", end="cancelled") == 1
    finally:
        os.kill(workers.processes[1].pid, signal.SIGCONT)
        d.engine.close()


def kill_under_load(workers: StageWorkers, number: int, kind: str) -> None:
    """Requests are being computed by a worker when it dies, and all are answered; then another
    one is there, and computes."""

    async def test() -> None:
        engine = AsyncEngine(alone(workers, kind), build=lambda c: settle_costs(build_tiny(c)))
        plain = AsyncEngine(CONFIG, build=build_tiny)
        await engine.start()
        await plain.start()
        found = stages_of(engine.engine)
        try:
            await asyncio.to_thread(wait_until, lambda: found.ready)
            process = workers.processes[number]
            os.kill(process.pid, signal.SIGSTOP)  # so that it dies in the middle of its work
            answers: list[list[list[int]]] = []
            for each in (engine, plain):
                made = [
                    await prompt(each, f"{n} " * 50, picture(800 + n), "Say it.") for n in range(6)
                ]
                running = [
                    asyncio.create_task(collect(each.submit(str(n), p, GREEDY)))
                    for n, p in enumerate(made)
                ]
                if each is engine:
                    await asyncio.to_thread(wait_until, lambda: found.told()[kind]["jobs"] == 6)
                    os.kill(process.pid, signal.SIGKILL)
                answers.append([tokens(events) for events in await asyncio.gather(*running)])
            assert answers[0] == answers[1] and all(answers[0])
            values = engine.metrics.values()
            assert values[f'mmserve:stage_jobs_total{{end="lost",stage="{kind}"}}'] == 6
            await asyncio.to_thread(wait_until, lambda: found.ready)
            assert workers.processes[number].pid != process.pid
            again = await prompt(engine, "Once more", picture(900), "and " * 60)
            assert await collect(engine.submit("again", again, GREEDY))
            values = engine.metrics.values()
            assert values[f'mmserve:stage_jobs_total{{end="done",stage="{kind}"}}'] == 1
            assert engine.stages[kind]["connected"] == 1
        finally:
            await engine.stop()
            await plain.stop()

    run(test)


def test_a_killed_encoder_costs_no_request_and_is_replaced(workers: StageWorkers) -> None:
    kill_under_load(workers, 0, "encode")


def test_a_killed_prefiller_costs_no_request_and_is_replaced(workers: StageWorkers) -> None:
    kill_under_load(workers, 1, "prefill")


def test_a_worker_of_another_model_is_not_asked(
    workers: StageWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mmserve.handover")
    model = tiny_model()
    model.spec.weights_id = bytes([1] * 32)
    d = Driver(settle_costs(Engine(workers.config, model)))
    try:
        wait_until(lambda: caplog.text.count("has another model") == 2)
        assert not any(client.connected for client in stages_of(d.engine).clients)
        assert d.ask(words(1, 200)) == Driver(build_tiny(CONFIG)).ask(words(1, 200))
    finally:
        d.engine.close()


def test_a_public_family_s_prompts_come_with_the_images_that_they_hold(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = families.build("qwen2_5_vl", tmp_path_factory.getbasetemp() / "families")
    pools = CacheConfig(text_bytes=1 << 22, vision_bytes=1 << 22)
    config = EngineConfig(ModelConfig(model=str(folder), device="cpu"), pools)
    with pytest.raises(ValueError, match="images of this model see the text before them"):
        build_engine(replace(config, stages=StageConfig(encode=("/nowhere/0",))))
    made = StageWorkers(config, recipes.family, [Place("prefill")])
    made.start()
    d = driver(made, "prefill", build=build_engine)
    plain = Driver(build_engine(config))
    try:
        for parts in (*CASES, *CASES[:1]):
            long = (*parts, "Tell me all about it. " * 40)
            assert d.ask(*segments(d, long)) == plain.ask(*segments(plain, long))
        assert figure(d, "stage_jobs", stage="prefill", end="done") >= 2
        assert d.counts()[0] == 0
    finally:
        d.engine.close()
        made.close()


def test_ranks_and_stages_exclude_each_other() -> None:
    config = replace(CONFIG, tensor_parallel_size=2, stages=StageConfig(prefill=("a:1",)))
    with pytest.raises(ValueError, match="--stages cannot be had"):
        refuse(config)

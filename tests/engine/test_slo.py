"""Promised times in an engine: what it has measured refuses what would break them, by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmserve.errors import OverloadedError
from mmserve.request import FinishReason
from tests.engine.driver import picture
from tests.engine.test_async_engine import (
    GREEDY,
    LONG,
    Gate,
    at_rest,
    collect,
    prompt,
    reason,
    run,
    running,
)
from tests.engine.tiny import tiny_config


def test_a_request_that_would_wait_for_too_long_is_refused_and_taken_once_there_is_room() -> None:
    async def test() -> None:
        config = tiny_config(max_num_seqs=8)
        never = replace(config.scheduler, slo_ttft_s=1e-6, slo_itl_s=10.0)
        async with running(replace(config, scheduler=never)) as engine:
            made = await prompt(engine, "Hello", picture(1))
            await collect(engine.submit("first", made, GREEDY))  # nothing waits: it is taken
            assert await at_rest(engine)
            gate = Gate(engine.engine)
            taken = engine.submit("taken", made, GREEDY)
            with pytest.raises(OverloadedError, match="the target is 1e-06 s") as refused:
                engine.submit("refused", made, GREEDY)
            assert (refused.value.status, refused.value.code) == (429, "overloaded")
            assert refused.value.retry_after_s and refused.value.retry_after_s > 0
            gate.open()
            assert reason(await collect(taken)) is FinishReason.LENGTH
            assert reason(await collect(engine.submit("later", made, GREEDY)))
            shown = engine.metrics.render().decode()
            assert 'mmserve:request_refusals_total{reason="overloaded"} 1.0' in shown

    run(test)


def test_answers_are_those_of_an_engine_without_promises() -> None:
    async def test() -> None:
        config = tiny_config()
        slow = replace(config.scheduler, slo_itl_s=1e-6)  # as small steps as there can be
        answers = []
        for scheduler in (config.scheduler, slow):
            async with running(replace(config, scheduler=scheduler)) as engine:
                made = [await prompt(engine, f"What is {n}? " * 12, picture(n)) for n in range(4)]
                params = replace(LONG, max_tokens=12)
                all_at_once = [engine.submit(str(n), each, params) for n, each in enumerate(made)]
                events = [await collect(generation) for generation in all_at_once]
                answers.append([[t for e in of for t in e.token_ids] for of in events])
                assert await at_rest(engine)
        assert answers[0] == answers[1]

    run(test)

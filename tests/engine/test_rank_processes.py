"""Ranks as processes: other runners and models, one that dies, one that is left alone.

Each test starts its own, one after another: a process is of one team at a time.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from mmserve.config import CacheConfig, EngineConfig, ModelConfig
from mmserve.engine import ranks
from mmserve.engine.async_engine import AsyncEngine
from mmserve.engine.build_engine import load_part
from mmserve.engine.build_runner import build_runner
from mmserve.engine.ranks import parallel_engine
from mmserve.engine.team import Leader
from mmserve.request import FinishReason, SamplingParams
from tests.engine import recipes
from tests.engine.driver import GREEDY, Driver, picture, words
from tests.engine.test_async_engine import LONG, ask, collect, prompt, run
from tests.engine.test_families import BRIEF, Family
from tests.engine.test_ranks import TWO, check, started
from tests.engine.tiny import build_tiny, tiny_config
from tests.model import families
from tests.model.border import open_border

pytestmark = pytest.mark.slow


def test_the_gpus_runner_and_its_layers_add_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "build_runner", build_runner)  # as it was, behind this test
    brief = SamplingParams(max_tokens=3, temperature=0.0)  # several rows, then single ones
    config = replace(TWO, model=replace(TWO.model, dtype="float32"))
    driver = started(recipes.tiny_on_the_gpus_runner, config)
    plain = Driver(build_tiny(replace(config, tensor_parallel_size=1)))
    try:
        answers = [d.ask(words(2, 5), d.image(picture(1)), params=brief) for d in (driver, plain)]
        assert answers[0] == answers[1]
        mine, whole = (torch.stack(next(iter(d.logits.values()))) for d in (driver, plain))
        torch.testing.assert_close(mine, whole, rtol=0, atol=2e-3)
    finally:
        driver.engine.close()


def test_keys_and_values_in_fewer_bits_are_cut_by_heads_too() -> None:
    formats = tiny_config(text_format="int4", vision_format="int2", max_num_batched_tokens=48)
    config = replace(formats, tensor_parallel_size=2)
    two = started(config=config)
    try:
        check(Driver(build_tiny(replace(config, tensor_parallel_size=1))), two)
    finally:
        two.engine.close()


def test_a_public_checkpoint_gives_transformers_tokens(tmp_path: Path) -> None:
    """Layers with windows and with norms behind them, whose images come in rows of the prompt."""
    folder = families.build("gemma3", tmp_path)
    family = Family("gemma3", folder, open_border(folder))
    model = ModelConfig(model=str(folder), device="cpu")
    cache = CacheConfig(text_bytes=1 << 24, vision_bytes=1 << 24)
    config = EngineConfig(model, cache, TWO.scheduler, tensor_parallel_size=2)
    driver = started(load_part, config)
    brief = replace(GREEDY, max_tokens=BRIEF)
    try:
        for case in ("text", "one", "three", "one"):
            request = driver.submit(family.segments(driver, case), brief)
            driver.run()
            family.check(driver, request, case, BRIEF)
    finally:
        driver.engine.close()


def test_a_rank_that_dies_ends_the_engine_and_the_next_one_answers() -> None:
    async def test() -> None:
        build = partial(parallel_engine, recipe=recipes.tiny)
        for number in range(2):  # the second as after the process has been started again
            engine = AsyncEngine(TWO, build=build)
            await engine.start()
            team = engine.engine.runner.team
            assert isinstance(team, Leader)
            try:
                assert await ask(engine, "before", "Hello", picture(1))
                if number:
                    return
                made = await prompt(engine, "Hello", picture(1))
                running = asyncio.create_task(collect(engine.submit("doomed", made, LONG)))
                while not engine.engine.num_launched > 3:
                    await asyncio.sleep(0.002)
                team.processes[0].kill()
                last = (await running)[-1]
                assert last.finish_reason is FinishReason.ERROR
                assert last.code in ("engine_unavailable", "engine_restarted")
                assert "rank" in await engine.lost() and engine.status == "dead"
            finally:
                await engine.stop()
                await asyncio.to_thread(engine._thread.stop)

    run(test)


def test_ranks_end_with_a_first_one_that_is_killed() -> None:
    command = [sys.executable, "-m", "tests.engine.two_ranks"]
    first = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert first.stdout is not None
    pids = [int(word) for word in first.stdout.readline().split()]
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert pids
    while any(Path(f"/proc/{pid}").exists() and not _ended(pid) for pid in pids):
        time.sleep(0.05)


def _ended(pid: int) -> bool:
    """Whether nobody has asked after it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_a_rank_that_cannot_start_is_named() -> None:
    with pytest.raises(ValueError, match="rank 1 of 2 could not start"):
        started(recipes.tiny_with_the_first)

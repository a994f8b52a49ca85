"""The asyncio face: many readers at once, aborts, refusals by name, and faults that stay small.

Each test runs its own event loop around a tiny engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from mmserve.config import EngineConfig, ImageLimits
from mmserve.engine.async_engine import AsyncEngine
from mmserve.engine.engine import Engine
from mmserve.engine.generation import Generation
from mmserve.errors import (
    ContextLengthExceededError,
    EngineUnavailableError,
    InvalidImageError,
    QueueFullError,
    RequestError,
    TooManyImagesError,
    UnsupportedImageTypeError,
)
from mmserve.prompt import ImagePart, Message, Prompt, TextPart, TokensPart
from mmserve.request import FinishReason, SamplingParams, Streaming, TokenEvent
from tests.engine.driver import picture
from tests.engine.tiny import IMAGE_TOKENS, MAX_LEN, build_tiny, tiny_config

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
LONG = replace(GREEDY, max_tokens=300, ignore_eos=True)
HANG_S = 300.0  # only what never ends takes so long


@asynccontextmanager
async def running(config: EngineConfig | None = None) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(config or tiny_config(), build=build_tiny)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), HANG_S)

    asyncio.run(bounded())


def user(*parts: str | bytes) -> list[Message]:
    """One user turn; bytes are image files."""
    return [
        Message(
            "user",
            tuple(
                TextPart(p) if isinstance(p, str) else ImagePart(p, f"parts[{i}]")
                for i, p in enumerate(parts)
            ),
        )
    ]


async def prompt(engine: AsyncEngine, *parts: str | bytes) -> Prompt:
    return await engine.prepare(user(*parts))


async def collect(generation: Generation) -> list[TokenEvent]:
    return [event async for event in generation]


def tokens(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def reason(events: list[TokenEvent]) -> FinishReason | None:
    return events[-1].finish_reason


async def ask(engine: AsyncEngine, request_id: str, *parts: str | bytes) -> list[int]:
    made = await prompt(engine, *parts)
    return tokens(await collect(engine.submit(request_id, made, GREEDY)))


def idle(engine: Engine) -> bool:
    text, vision = engine.scheduler.text[0], engine.runner.vision[0].index
    free = text.num_free + engine.scheduler.holdings.cached_pages(0) == text.num_pages
    return free and vision.num_referenced == 0 and not engine.has_work


async def at_rest(engine: AsyncEngine) -> bool:
    """True once nothing is left: a step launched behind the last event may still have to land."""
    while not await engine.call(lambda: idle(engine.engine)):
        pass
    return True


class Gate:
    """Lets the engine thread take `steps` steps, then holds it before the next until opened."""

    def __init__(self, engine: Engine, steps: int = 0) -> None:
        self._open, self._step, self._steps = threading.Event(), engine.step, steps
        engine.step = self._gated  # type: ignore[method-assign]

    def _gated(self) -> Any:
        self._steps -= 1
        assert self._steps >= 0 or self._open.wait(HANG_S)
        return self._step()

    def open(self) -> None:
        self._open.set()


def test_generations_at_once_each_get_what_they_get_alone() -> None:
    async def test() -> None:
        async def one(engine: AsyncEngine, n: int) -> list[int]:
            return await ask(engine, str(n), f"What is {n}?", picture(n), "Say it.")

        async with running() as engine:
            together = await asyncio.gather(*(one(engine, n) for n in range(12)))
            assert await at_rest(engine)
        for n in (0, 5, 11):
            async with running() as engine:
                assert await one(engine, n) == together[n]

    run(test)


def test_the_last_event_ends_the_stream_and_brings_the_counts() -> None:
    async def test() -> None:
        async with running() as engine:
            made = await prompt(engine, "Hello", picture(1))
            events = await collect(engine.submit("a", made, GREEDY))
            usage = events[-1].usage
            assert reason(events) is FinishReason.LENGTH and usage is not None
            assert usage.prompt_tokens == made.num_tokens and usage.completion_tokens == 6
            assert usage.image_tokens == made.num_image_tokens == IMAGE_TOKENS
            assert all(event.usage is None for event in events[:-1])
            assert engine.info.image_tokens == IMAGE_TOKENS and engine.info.name == "tiny"

    run(test)


def test_a_conversation_goes_on_from_its_exact_tokens_and_finds_its_cache() -> None:
    async def test() -> None:
        async with running() as engine:
            first = user("Look at this picture, please", picture(1))
            made = await engine.prepare(first)
            said = tokens(await collect(engine.submit("a", made, GREEDY)))
            turn = [
                *first,
                Message("assistant", (TokensPart(tuple(said)),)),
                *user("And now?"),
            ]
            made = await engine.prepare(turn)
            events = await collect(engine.submit("b", made, GREEDY))
            usage = events[-1].usage
            assert usage is not None and usage.vision_misses == 0
            assert usage.cached_tokens > usage.cached_image_tokens == IMAGE_TOKENS

    run(test)


def test_an_abort_ends_a_generation_soon_and_leaves_the_others() -> None:
    async def test() -> None:
        async with running() as engine:
            made = await prompt(engine, "Tell me a long story", picture(1))
            gate = Gate(engine.engine, steps=20)
            doomed, other = engine.submit("a", made, LONG), engine.submit("b", made, GREEDY)
            events = []
            async for event in doomed:
                events.append(event)
                if len(events) == 3:
                    doomed.abort()
                    gate.open()
            assert reason(events) is FinishReason.ABORT and len(tokens(events)) <= 20
            assert len(tokens(await collect(other))) == 6
            doomed.abort()
            assert await at_rest(engine)

    run(test)


def test_an_abort_before_the_first_step_ends_a_generation_too() -> None:
    async def test() -> None:
        async with running() as engine:
            made = await prompt(engine, "Hello")
            gate = Gate(engine.engine)
            generation = engine.submit("a", made, LONG)
            generation.abort()
            gate.open()
            assert reason(await collect(generation)) is FinishReason.ABORT

    run(test)


def test_five_hundred_aborted_streams_leave_the_engine_as_it_was() -> None:
    """B24."""

    async def test() -> None:
        async with running() as engine:
            made = await prompt(engine, "Tell me a long story", picture(1))

            async def drop(n: int) -> None:
                generation = engine.submit(str(n), made, LONG)
                seen = 0
                async for _ in generation:
                    seen += 1
                    if seen == 1 + n % 5:
                        generation.abort()

            for first in range(0, 500, 50):
                await asyncio.gather(*(drop(first + n) for n in range(50)))
            assert await at_rest(engine)
            assert len(await ask(engine, "last", "Hello")) == 6

    run(test)


def test_stop_ends_every_generation_and_refuses_new_ones() -> None:
    async def test() -> None:
        engine = AsyncEngine(tiny_config(), build=build_tiny)
        assert engine.status == "loading"
        with pytest.raises(EngineUnavailableError, match="loading"):
            await prompt(engine, "Hello")
        await engine.start()
        made = await prompt(engine, "Hello")
        gate = Gate(engine.engine)
        generations = [engine.submit(str(n), made, LONG) for n in range(3)]
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)  # it has sent its commands and waits for the thread
        gate.open()
        await stopping
        for generation in generations:
            assert reason(await collect(generation)) is FinishReason.ABORT
        assert engine.status == "dead"
        with pytest.raises(EngineUnavailableError, match="dead"):
            engine.submit("late", made, GREEDY)

    run(test)


def test_a_build_that_fails_is_raised_by_start() -> None:
    def build(config: EngineConfig) -> Engine:
        raise ValueError("no such model")

    async def test() -> None:
        engine = AsyncEngine(tiny_config(), build=build)
        with pytest.raises(ValueError, match="no such model"):
            await engine.start()
        await engine.stop()

    run(test)


@pytest.mark.parametrize("max_waiting", [1, 3])
def test_a_full_queue_is_refused_even_before_the_engine_has_seen_it(max_waiting: int) -> None:
    async def test() -> None:
        config = tiny_config(max_num_seqs=2, max_waiting=max_waiting)
        async with running(config) as engine:
            made = await prompt(engine, "Hello")
            gate = Gate(engine.engine)
            accepted = [engine.submit(str(n), made, GREEDY) for n in range(2 + max_waiting)]
            with pytest.raises(QueueFullError, match=f"limit is {2 + max_waiting}") as refused:
                engine.submit("more", made, GREEDY)
            assert (refused.value.status, refused.value.code) == (429, "queue_full")
            gate.open()
            for generation in accepted:
                assert reason(await collect(generation)) is FinishReason.LENGTH
            assert len(await ask(engine, "later", "Hello")) == 6

    run(test)


def test_what_is_computed_ahead_takes_no_place_of_an_answer() -> None:
    async def test() -> None:
        async with running(tiny_config(max_num_seqs=2, max_waiting=1)) as engine:
            made = await prompt(engine, "Hello")
            gate = Gate(engine.engine)
            ahead = [engine.submit(f"ahead {n}", made, GREEDY, prefill_only=True) for n in range(3)]
            with pytest.raises(QueueFullError, match="limit is 3"):
                engine.submit("one more", made, GREEDY, prefill_only=True)
            answers = [engine.submit(str(n), made, GREEDY) for n in range(3)]
            gate.open()
            for generation in answers:
                assert reason(await collect(generation)) is FinishReason.LENGTH
            for generation in ahead:
                assert reason(await collect(generation)) is FinishReason.STOP
            assert not engine.num_running

    run(test)


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers() -> None:
    async def test() -> None:
        async with running() as engine:
            made = await prompt(engine, "x" * 600)
            with pytest.raises(ContextLengthExceededError, match=str(MAX_LEN)) as refused:
                engine.submit("a", made, GREEDY)
            assert refused.value.code == "context_length_exceeded"
            assert str(made.num_tokens) in refused.value.message
            decodes = engine.metrics.image_decodes
            with pytest.raises(ContextLengthExceededError, match="26 images take 520"):
                await prompt(engine, *(picture(n) for n in range(26)))
            assert next(iter(decodes.collect())).samples[0].value == 0
            assert await at_rest(engine)

    run(test)


def test_too_many_images_are_refused_by_the_first_one_too_many() -> None:
    async def test() -> None:
        config = replace(tiny_config(), images=ImageLimits(max_images=2))
        async with running(config) as engine:
            images = [picture(n) for n in range(4)]
            with pytest.raises(TooManyImagesError, match="4 images; the limit is 2") as refused:
                await prompt(engine, *images)
            assert refused.value.param == "parts[2]"
            earlier = Message("user", tuple(ImagePart(d, earlier=True) for d in images))
            made = await engine.prepare([earlier, *user(picture(8), picture(9))])
            assert made.num_image_tokens == 6 * IMAGE_TOKENS

    run(test)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", InvalidImageError),
        (b"<html></html>", UnsupportedImageTypeError),
        (picture(1)[:-6], InvalidImageError),
    ],
)
def test_a_bad_image_is_refused_with_its_place(data: bytes, error: type[RequestError]) -> None:
    async def test() -> None:
        async with running() as engine:
            with pytest.raises(error) as refused:
                await prompt(engine, "Look:", picture(2), data)
            assert refused.value.param == "parts[2]" and refused.value.status == 400
            assert len(await ask(engine, "a", "Hello", picture(2))) == 6

    run(test)


@pytest.mark.parametrize(
    "params",
    [{"max_tokens": 0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"logprobs": 99}],
)
def test_parameters_out_of_range_are_refused_by_name(params: dict[str, Any]) -> None:
    async def test() -> None:
        async with running() as engine:
            made = await prompt(engine, "Hello")
            with pytest.raises(RequestError) as refused:
                engine.submit("a", made, replace(GREEDY, **params))
            assert refused.value.param == next(iter(params))

    run(test)


def test_a_step_that_raises_ends_its_requests_and_the_engine_goes_on() -> None:
    async def test() -> None:
        async with running() as engine:
            made = await prompt(engine, "Hello", picture(1))
            runner = engine.engine.runner
            whole, calls = runner.run, 0

            def fails_once(batch: Any, previous: Any = None) -> Any:
                nonlocal calls
                calls += 1
                if calls == 3:
                    raise RuntimeError("a secret detail")
                return whole(batch, previous)

            runner.run = fails_once  # type: ignore[method-assign]
            gate = Gate(engine.engine)
            both = [engine.submit(name, made, LONG) for name in "ab"]
            gate.open()
            for generation in both:
                events = await collect(generation)
                assert reason(events) is FinishReason.ERROR
                assert events[-1].error and "secret" not in events[-1].error
            assert await at_rest(engine)
            cold = await ask(engine, "c", "Hello", picture(1))
        async with running() as engine:
            assert await ask(engine, "c", "Hello", picture(1)) == cold

    run(test)


def test_a_prefill_ends_without_text_and_the_turn_after_it_reports_the_cache() -> None:
    async def test() -> None:
        async with running() as engine:
            made = await prompt(engine, "A question about this", picture(1))
            events = await collect(engine.submit("a", made, GREEDY, prefill_only=True))
            assert tokens(events) == [] and reason(events) is FinishReason.STOP
            events = await collect(engine.submit("b", made, GREEDY))
            usage = events[-1].usage
            assert usage is not None and usage.vision_hits == 1
            assert usage.cached_tokens == made.num_text_tokens // 16 * 16 + IMAGE_TOKENS

    run(test)


def test_an_answer_beyond_the_context_is_one_answer_and_says_what_it_left_behind() -> None:
    async def test() -> None:
        async with running() as engine:
            made = await prompt(engine, picture(1), "What?")
            long = replace(LONG, max_tokens=2 * MAX_LEN)
            events = await collect(
                engine.submit("a", made, long, streaming=Streaming(200, 4, 40, 0))
            )
            usage = events[-1].usage
            assert len(tokens(events)) == 2 * MAX_LEN and usage is not None
            assert usage.dropped_tokens > 2 * MAX_LEN - 200 and usage.dropped_images == 1
            assert await at_rest(engine)

    run(test)


def test_an_image_that_is_gone_needs_no_bytes_and_one_that_is_marked_is_not_encoded() -> None:
    async def test() -> None:
        async with running() as engine:
            gone, marked = ImagePart(b"", state="gone"), ImagePart(picture(1), state="marked")
            made = await engine.prepare([Message("user", (gone, marked, TextPart("What?")))])
            assert reason(await collect(engine.submit("a", made, GREEDY))) is FinishReason.LENGTH
            assert engine.metrics.vision_encoder_runs._value.get() == 0
            assert await at_rest(engine)

    run(test)

"""The engine's asyncio face: prepare, submit, stream, abort.

Owns the engine thread and the hand-over between it and the event loop. Knows nothing of JSON or
HTTP. The thread alone touches the engine; the loop sends it commands and receives events.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mmserve.config import EngineConfig
from mmserve.engine import kv_sharing
from mmserve.engine.build_engine import build_engine
from mmserve.engine.engine import Engine, Event
from mmserve.engine.generation import Generation, alike, before
from mmserve.engine.model_info import ModelInfo
from mmserve.engine.recovery import EngineLostError, shrink
from mmserve.engine.refusals import counted, counted_later
from mmserve.engine.sampling_limits import validate
from mmserve.engine.thread import EngineThread
from mmserve.engine.watchdog import PATIENCE, Verdict, Watchdog
from mmserve.errors import (
    ContextLengthExceededError,
    EngineUnavailableError,
    ModelLoadingError,
    QueueFullError,
    ShuttingDownError,
    TooManyImagesError,
)
from mmserve.held_image import HeldImage, ImageId
from mmserve.kv_snapshot import Snapshot
from mmserve.metrics import Metrics
from mmserve.prompt import Message, Prompt, present_images
from mmserve.request import (
    EVERYBODY,
    Constraint,
    FinishReason,
    ImageInput,
    Request,
    SamplingParams,
    Streaming,
    Tenant,
    Timings,
    TokenEvent,
    Usage,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")


class _OnLoop:
    """Brings what the engine's thread tells to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, engine: AsyncEngine) -> None:
        self._loop, self._engine = loop, engine

    def _soon(self, tell: Callable[..., None], *what: Any) -> None:
        with contextlib.suppress(RuntimeError):  # a thread that was given up outlives the loop
            self._loop.call_soon_threadsafe(tell, *what)

    def began(self, engine: Engine) -> None:
        self._soon(self._engine._begin, engine)

    def happened(self, events: list[Event]) -> None:
        self._soon(self._engine._dispatch, events)

    def broke(self) -> None:
        self._soon(self._engine._pause)

    def lost(self, error: Exception) -> None:
        self._soon(self._engine._give_up, error)


class AsyncEngine:
    """`status` goes from loading to ok, maybe through restarting or stalled and back, then to
    draining and dead."""

    _loaded: asyncio.Future[Engine]
    _lost: asyncio.Future[str]

    def __init__(
        self, config: EngineConfig, build: Callable[[EngineConfig], Engine] = build_engine
    ) -> None:
        self.config = config
        self.status = "loading"
        self._engine: Engine | None = None
        self._generations: dict[str, Generation] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._thread = EngineThread(partial(build, config), config.faults)
        self._started = False
        self._watching: asyncio.Task[None] | None = None
        # Decoding images is most of preparation; two at a time leave the step loop its cores.
        threads = max(2, config.decoding.processes)
        self._workers = ThreadPoolExecutor(threads, thread_name_prefix="prepare")
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="compile")

    async def start(self) -> None:
        """Load the model and start stepping. Raises what loading raises.

        The engine's thread loads, too, and builds whatever engine comes after: OpenMP keeps a team
        of workers for every thread that ever computed, and with more of them than cores it stops
        spinning between two products, which made each step of a small model a half longer.
        """
        loop = asyncio.get_running_loop()
        self._loaded, self._lost = loop.create_future(), loop.create_future()
        self._started = True
        self._thread.start(_OnLoop(loop, self))
        engine = await self._loaded
        self.info = ModelInfo(
            name=self.config.model.served_name or engine.name,
            max_model_len=engine.max_model_len,
            image_tokens=engine.least_image_tokens,
            image_limits=self.config.images,
            created=int(time.time()),
            default_sampling=engine.default_sampling,
            tool_format=engine.template.tool_format,
            vision_mode=engine.runner.mode.name,
            blend_tokens=engine.runner.mode.head,
            image_details=engine.border.image_details,
            image_crops=engine.border.image_crops,
        )
        if self.config.watchdog_s:
            self._watching = loop.create_task(self._watch(self.config.watchdog_s))

    async def stop(self) -> None:
        """End every request and the thread, unless that is lost."""
        if self._watching is not None:
            self._watching.cancel()
        lost, self.status = self.status == "dead", "draining"
        if self._started and not lost:
            self._thread.send(lambda engine: engine.abort_all(FinishReason.ABORT))
            await asyncio.to_thread(self._thread.stop)
        for workers in (self._workers, self._compiler):
            workers.shutdown(wait=False, cancel_futures=True)
        self.status = "dead"

    async def lost(self) -> str:
        """Wait until no engine of this process can compute any more; why."""
        return await asyncio.shield(self._lost)

    @property
    def engine(self) -> Engine:
        """The engine behind; read its counts, change nothing."""
        if self._engine is None:
            raise ModelLoadingError("The model is still loading.")
        return self._engine

    @property
    def num_running(self) -> int:
        """Requests that have not ended, those that wait included."""
        return len(self._generations)

    @property
    def stages(self) -> Mapping[str, Any]:
        """Of workers that may compute parts of prompts, by kind; empty where there are none."""
        tiers = self._engine.tiers if self._engine is not None else None
        return tiers.staging.stages.told() if tiers is not None and tiers.staging else {}

    @property
    def metrics(self) -> Metrics:
        return self.engine.metrics

    @counted_later
    async def prepare(
        self,
        messages: Sequence[Message],
        *,
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        constraint: Constraint | None = None,
        tenant: Tenant = EVERYBODY,
    ) -> Prompt:
        """Check and identify the images, decode unknown ones, render the conversation.

        `tools`: what the model is told of, as chat templates take it. `constraint`: what the
        answer's parameters will hold; it is compiled here. `tenant`: whose the images are. Raises
        `RequestError`s, images' and the constraint's with their `param`.
        """
        engine = self.engine
        parts = present_images(messages)
        limit = self.config.images.max_images
        new = [p for p in parts if not p.earlier]
        if len(new) > limit:
            raise TooManyImagesError(
                f"The request has {len(new)} images; the limit is {limit}.",
                param=new[limit].param,
            )
        # A prompt that cannot fit is refused before any image of it is decoded.
        floor = len(parts) * engine.least_image_tokens
        if floor >= engine.max_model_len:
            raise ContextLengthExceededError(
                f"The {len(parts)} images take {floor} tokens; the context limit is "
                f"{engine.max_model_len}."
            )
        loop = asyncio.get_running_loop()
        if constraint is not None and not engine.grammars.knows(constraint):
            # Before any image is decoded, and not in the images' way.
            await loop.run_in_executor(self._compiler, engine.grammars.matcher, constraint)
        common = partial(engine.pipeline.prepare, alone=len(parts) == 1, salt=tenant.salt)
        calls = [partial(common, p.data, p.param, detail=p.detail) for p in parts]
        images: list[ImageInput] = await asyncio.gather(
            *(loop.run_in_executor(self._workers, call) for call in calls)
        )
        return await loop.run_in_executor(
            self._workers,
            lambda: engine.template.render(
                messages, images, continue_final=continue_final, tools=tools
            ),
        )

    async def identify(self, data: bytes, tenant: Tenant = EVERYBODY) -> ImageId:
        """What a tenant's image file is called here."""
        loop, identify = asyncio.get_running_loop(), self.engine.pipeline.identify
        return await loop.run_in_executor(self._workers, identify, data, tenant.salt)

    async def held_images(self, images: Sequence[ImageId]) -> list[HeldImage]:
        """Where each image's KV is, between two steps."""
        held = self.engine.images.held
        return await self.call(lambda: held(images))

    async def pin_image(self, image: ImageId) -> None:
        """Keep an image's KV in the pool. Raises `PinBudgetExceededError`."""
        pin = self.engine.images.pin
        await self.call(lambda: pin(image))

    def unpin_image(self, image: ImageId) -> None:
        """Soon, and harmless when it is not pinned."""
        self._thread.send(lambda engine: engine.images.unpin(image))

    async def kv_snapshot(self) -> Snapshot:
        """Whose each page of the pools is, between two steps."""
        return await self.call(self.engine.page_owners.look)

    async def drop_image(self, key: bytes) -> bool:
        """Forget an image's KV, of the vision pools alone. False: it is not there, or in use."""
        return await self.call(partial(self.engine.images.drop, key))

    async def count(self, texts: Sequence[str]) -> list[int]:
        """The tokens of each text by itself."""
        loop, encode = asyncio.get_running_loop(), self.engine.tokenizer.encode
        return await loop.run_in_executor(self._workers, lambda: [len(encode(t)) for t in texts])

    @counted
    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        prefill_only: bool = False,
        streaming: Streaming | None = None,
        durable: bool = False,
        tenant: Tenant = EVERYBODY,
    ) -> Generation:
        """Queue a generation; `streaming`: how it goes on where it would outgrow the context or
        its own window; `durable`: its KV may reach the disk. Raises
        ContextLengthExceededError, QueueFullError, EngineUnavailableError or, for parameters out of
        range, RequestError. A constraint that `prepare` has not seen is compiled here, while the
        event loop waits."""
        engine = self.engine
        if self.status != "ok":
            refused = ShuttingDownError if self.status == "draining" else EngineUnavailableError
            raise refused(f"The engine is {self.status}.")
        # Counted here, where they come in: the engine's own queue lags behind a burst.
        limit = self.config.scheduler.max_num_seqs + self.config.scheduler.max_waiting
        if (count := alike(self._generations.values(), prefill_only)) >= limit:
            raise QueueFullError(f"{count} requests are running or waiting; the limit is {limit}.")
        validate(params, engine.vocab_size)
        how: dict[str, Any] = {"streaming": streaming, "durable": durable, "tenant": tenant}
        request = Request(request_id, prompt.segments, params, prefill_only, **how)
        engine.scheduler.check_admissible(request, prompt.num_text_tokens, prompt.num_image_tokens)
        assert request_id not in self._generations, "request ids are unique"
        if (pace := engine.scheduler.pace) is not None and not prefill_only:
            images = len(request.images)
            rows = pace.weigh(prompt.num_text_tokens, prompt.num_image_tokens, images)
            pace.check(rows, before(self._generations.values(), pace.left))
        generation = Generation(request_id, self._abort, prompt.num_tokens, prefill_only)
        constraint = None if prefill_only else params.constraint
        matcher = engine.grammars.matcher(constraint) if constraint else None
        self._generations[request_id] = generation
        self._thread.send(lambda engine: engine.add(request, matcher))
        return generation

    async def export_kv(self, path: Path) -> None:
        """Write all that is cached to a KV file. Raises KVRefusedError."""
        await kv_sharing.export_kv(self, path)

    async def import_kv(self, path: Path) -> dict[str, Any]:
        """Take a KV file in; what came of it, as JSON has it. Raises KVRefusedError."""
        return await kv_sharing.import_kv(self, path)

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread between two steps; raises what it raises.

        For what computes with PyTorch beside the engine (see `start`). Raises
        EngineUnavailableError where no engine is left to do it.
        """
        if self.status == "dead":
            raise EngineUnavailableError("The engine has stopped.")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def tell(settle: Callable[[Any], None], what: Any) -> None:
            if not future.done():
                settle(what)

        def run(_: Engine) -> None:
            try:
                result = function()
            except Exception as error:
                loop.call_soon_threadsafe(tell, future.set_exception, error)
            else:
                loop.call_soon_threadsafe(tell, future.set_result, result)

        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        self._thread.send(run)
        return await future

    def shrink(self) -> None:
        """Soon: give back memory that is held only to save work."""
        self._thread.send(shrink)

    def _abort(self, request_id: str) -> None:
        if request_id in self._generations:
            self._thread.send(lambda engine: engine.abort(request_id))

    def _dispatch(self, events: list[Event]) -> None:
        for request_id, event in events:
            generation = self._generations.get(request_id)
            if generation is None:
                continue
            if event.finish_reason is not None:
                del self._generations[request_id]
            generation.put(event)

    def _end_all(self, error: str, code: str) -> None:
        """Nobody waits for ever for an engine that is not there any more."""
        event = TokenEvent(
            finish_reason=FinishReason.ERROR,
            error=error,
            code=code,
            usage=Usage(),
            timings=Timings(),
        )
        self._dispatch([(request_id, event) for request_id in self._generations])
        for call in [call for call in self._calls if not call.done()]:
            call.set_exception(EngineUnavailableError(error))

    async def _watch(self, limit_s: float) -> None:
        watchdog, loop = Watchdog(limit_s), asyncio.get_running_loop()
        while self.status != "dead":
            await asyncio.sleep(limit_s / 4)
            verdict = watchdog.look(self._thread.pulse(), loop.time())
            if verdict is Verdict.IDLING:
                self._thread.restart(f"no progress for {limit_s:g} s")
            elif verdict is Verdict.STUCK and self.status == "ok":
                logger.error("a step has taken %g s", limit_s)
                self.status = "stalled"
            elif verdict is Verdict.WELL and self.status == "stalled":
                self.status = "ok"
            elif verdict is Verdict.GONE:
                self._give_up(EngineLostError(f"a step did not end in {PATIENCE * limit_s:g} s"))

    # -- what the engine's thread tells, on the event loop ----------------------------------------

    def _begin(self, engine: Engine) -> None:
        """The first engine, or one in place of another."""
        if self._engine is not None:
            self._end_all("The engine was started anew; please try again.", "engine_restarted")
        self._engine = engine
        if self.status in ("loading", "restarting"):
            self.status = "ok"
        if not self._loaded.done():
            self._loaded.set_result(engine)

    def _pause(self) -> None:
        if self.status in ("ok", "stalled"):
            self.status = "restarting"

    def _give_up(self, error: Exception) -> None:
        if not self._loaded.done():
            return self._loaded.set_exception(error)
        if self.status != "draining":
            self.status = "dead"
        self._thread.abandon()
        self._end_all("The engine has stopped.", "engine_unavailable")
        if not self._lost.done():
            self._lost.set_result(str(error))

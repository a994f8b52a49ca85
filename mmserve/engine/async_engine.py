"""The engine's asyncio face: prepare, submit, stream, abort.

Owns the engine thread and the hand-over between it and the event loop. Knows nothing of JSON or
HTTP. The thread alone touches the engine; the loop sends it commands and receives events.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numba
import torch

from mmserve.config import EngineConfig
from mmserve.engine import kv_sharing
from mmserve.engine.border import build_border
from mmserve.engine.engine import Engine, Event
from mmserve.engine.model_info import ModelInfo
from mmserve.engine.model_runner import resolve_dtype
from mmserve.engine.refusals import counted, counted_later
from mmserve.engine.sampling_limits import validate
from mmserve.errors import (
    ContextLengthExceededError,
    ModelLoadingError,
    QueueFullError,
    ShuttingDownError,
    TooManyImagesError,
)
from mmserve.held_image import HeldImage, ImageId
from mmserve.kv_snapshot import Snapshot
from mmserve.metrics import Metrics
from mmserve.model.hub import is_native
from mmserve.model.loader import resolve_device
from mmserve.model.weights import load, open_named
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

STALL_S = 10.0  # no progress for so long is reported


class Generation:
    """The events of one submitted request, for one reader."""

    def __init__(self, id: str, abort: Callable[[str], None]) -> None:
        self.id = id
        self._abort = abort
        self._events: asyncio.Queue[TokenEvent] = asyncio.Queue()

    def put(self, event: TokenEvent) -> None:
        self._events.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        while True:
            event = await self._events.get()
            yield event
            if event.finish_reason is not None:
                return

    def abort(self) -> None:
        """Stop within one step; the last event then says ABORT. Harmless after the end."""
        self._abort(self.id)


def build_engine(config: EngineConfig) -> Engine:
    """Load the model (fetching it the first time) and build an engine around it.

    What can be refused before a public checkpoint's weights are read is refused then.
    """
    if config.model.num_threads is not None:
        torch.set_num_threads(config.model.num_threads)
    # The compiled kernels have threads of their own, as many as the machine has cores at most.
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
    model, pools = config.model, config.cache.text_bytes + config.cache.vision_bytes
    device, native = resolve_device(model.device), is_native(model.model)
    dtype = resolve_dtype(model.dtype, device, stock=not native)
    if native:
        return Engine(config, load(model))
    checkpoint = open_named(model)
    held = dtype + config.cache.formats
    border = build_border(checkpoint, config, dtype=held)
    return Engine(config, load(model, pools, checkpoint), border)


class AsyncEngine:
    """`status` goes from loading to ok, then draining and dead."""

    def __init__(
        self, config: EngineConfig, build: Callable[[EngineConfig], Engine] = build_engine
    ) -> None:
        self.config = config
        self.status = "loading"
        self._build = build
        self._engine: Engine | None = None
        self._commands: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._generations: dict[str, Generation] = {}
        self._thread: threading.Thread | None = None
        # Decoding images is most of preparation; two at a time leave the step loop its cores.
        threads = max(2, config.decoding.processes)
        self._workers = ThreadPoolExecutor(threads, thread_name_prefix="prepare")
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="compile")

    async def start(self) -> None:
        """Load the model and start stepping. Raises what loading raises.

        The engine's thread loads, too: OpenMP keeps a team of workers for every thread that ever
        computed, and with more of them than cores it stops spinning between two products, which
        made each step of a small model a half longer.
        """
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[Engine] = loop.create_future()
        arguments = (loop, loaded)
        self._thread = threading.Thread(
            target=self._run, args=arguments, name="engine", daemon=True
        )
        self._thread.start()
        self._engine = await loaded
        self.info = ModelInfo(
            name=self.config.model.served_name or self._engine.name,
            max_model_len=self._engine.max_model_len,
            image_tokens=self._engine.least_image_tokens,
            image_limits=self.config.images,
            created=int(time.time()),
            default_sampling=self._engine.default_sampling,
            tool_format=self._engine.template.tool_format,
            vision_mode=self._engine.runner.mode.name,
            blend_tokens=self._engine.runner.mode.head,
        )
        self.status = "ok"

    async def stop(self) -> None:
        """End every request and the thread."""
        self.status = "draining"
        if self._thread is not None:
            self._commands.put(lambda engine: engine.abort_all(FinishReason.ABORT))
            self._commands.put(None)
            await asyncio.to_thread(self._thread.join)
        for workers in (self._workers, self._compiler):
            workers.shutdown(wait=False, cancel_futures=True)
        self.status = "dead"

    @property
    def engine(self) -> Engine:
        """The engine behind; read its counts, change nothing."""
        if self._engine is None:
            raise ModelLoadingError("The model is still loading.")
        return self._engine

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
        prepare = partial(engine.pipeline.prepare, alone=len(parts) == 1, salt=tenant.salt)
        images: list[ImageInput] = await asyncio.gather(
            *(loop.run_in_executor(self._workers, prepare, p.data, p.param) for p in parts)
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
        self._commands.put(lambda engine: engine.images.unpin(image))

    async def kv_snapshot(self) -> Snapshot:
        """Whose each page of the pools is, between two steps."""
        return await self.call(self.engine.page_owners.look)

    async def drop_image(self, key: bytes) -> bool:
        """Forget an image's KV, of the vision pools alone. False: it is not there, or in use."""
        return await self.call(partial(self.engine.images.drop, key))

    async def count(self, texts: Sequence[str]) -> list[int]:
        """The tokens of each text by itself."""
        encode = self.engine.tokenizer.encode
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._workers, lambda: [len(encode(text)) for text in texts]
        )

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
            raise ShuttingDownError(f"The engine is {self.status}.")
        # Counted here, where they come in: the engine's own queue lags behind a burst.
        limits = self.config.scheduler
        if len(self._generations) >= limits.max_num_seqs + limits.max_waiting:
            raise QueueFullError(
                f"{len(self._generations)} requests are running or waiting; the limit is "
                f"{limits.max_num_seqs + limits.max_waiting}."
            )
        validate(params, engine.vocab_size)
        how: dict[str, Any] = {"streaming": streaming, "durable": durable, "tenant": tenant}
        request = Request(request_id, prompt.segments, params, prefill_only, **how)
        engine.scheduler.check_admissible(request, prompt.num_text_tokens, prompt.num_image_tokens)
        assert request_id not in self._generations, "request ids are unique"
        generation = Generation(request_id, self._abort)
        constraint = None if prefill_only else params.constraint
        matcher = engine.grammars.matcher(constraint) if constraint else None
        self._generations[request_id] = generation
        self._commands.put(lambda engine: engine.add(request, matcher))
        return generation

    async def export_kv(self, path: Path) -> None:
        """Write all that is cached to a KV file. Raises KVRefusedError."""
        await kv_sharing.export_kv(self, path)

    async def import_kv(self, path: Path) -> dict[str, Any]:
        """Take a KV file in; what came of it, as JSON has it. Raises KVRefusedError."""
        return await kv_sharing.import_kv(self, path)

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread between two steps; raises what it raises.

        For what computes with PyTorch beside the engine (see `start`).
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run(_: Engine) -> None:
            try:
                result = function()
            except Exception as error:
                loop.call_soon_threadsafe(future.set_exception, error)
            else:
                loop.call_soon_threadsafe(future.set_result, result)

        self._commands.put(run)
        return await future

    def _abort(self, request_id: str) -> None:
        if request_id in self._generations:
            self._commands.put(lambda engine: engine.abort(request_id))

    def _dispatch(self, events: list[Event]) -> None:
        for request_id, event in events:
            generation = self._generations.get(request_id)
            if generation is None:
                continue
            if event.finish_reason is not None:
                del self._generations[request_id]
            generation.put(event)

    def _end_all(self) -> None:
        """Nobody waits for ever for an engine that has died."""
        reason, error = FinishReason.ERROR, "The engine has stopped."
        event = TokenEvent(finish_reason=reason, error=error, usage=Usage(), timings=Timings())
        self._dispatch([(request_id, event) for request_id in self._generations])

    # -- the engine thread ----------------------------------------------------------------------

    def _run(self, loop: asyncio.AbstractEventLoop, loaded: asyncio.Future[Engine]) -> None:
        try:
            engine = self._build(self.config)
        except Exception as error:
            loop.call_soon_threadsafe(loaded.set_exception, error)
            return
        loop.call_soon_threadsafe(loaded.set_result, engine)
        try:
            self._step_until_stopped(engine, loop)
        except Exception:
            logger.exception("the engine cannot go on")
            self.status = "dead"
            loop.call_soon_threadsafe(self._end_all)
        finally:
            engine.close()

    def _step_until_stopped(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        moved = time.monotonic()
        while self._take_commands(engine):
            try:
                events = engine.step()
            except Exception:
                logger.exception("a step failed; its requests end with an error")
                engine.abort_all(FinishReason.ERROR, "The engine failed; please try again.")
                continue
            if events:
                moved = time.monotonic()
                loop.call_soon_threadsafe(self._dispatch, events)
            elif not engine.scheduler.has_work:  # what waits for files does not for ever
                moved = time.monotonic()
            elif time.monotonic() - moved > STALL_S:
                logger.error("no progress for %.0f s: %s", STALL_S, engine.describe())
                moved = time.monotonic()
        loop.call_soon_threadsafe(self._dispatch, engine.step())

    def _take_commands(self, engine: Engine) -> bool:
        """Obey what has been sent; wait if there is nothing else to do. False: stop."""
        block = not engine.has_work
        while True:
            try:
                command = self._commands.get(block)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(engine)
            block = False

"""The process of a stage worker: jobs in, keys and values out, by an engine that makes no tokens.

Owns the engine's loop, and a listener with one reader and one writer for each connection. Knows
nothing of who asks, or why. What fails beyond one job ends the process: whoever started it starts
another, and whoever waits for it computes for himself.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable
from multiprocessing import ProcessError, connection
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from mmserve.config import EngineConfig
from mmserve.engine.engine import Engine
from mmserve.engine.staging import refuse
from mmserve.errors import RequestError
from mmserve.handover import wire
from mmserve.handover.wire import Cancel, End, Hello, Job, Kind, Probe, Rates
from mmserve.request import ImageSegment, Request, SamplingParams, Tenant, TextSegment
from mmserve.stages.outlet import Errand, Outlet, StageEngine
from mmserve.tiers.kv_object import Now, Waits

logger = logging.getLogger(__name__)

# An engine of a class; any process can unpickle it.
Make = Callable[[EngineConfig, type[Engine]], Engine]

NOTHING = SamplingParams(max_tokens=1, temperature=0.0)
REHEARSED = 256  # tokens, whose speed the first word tells


class Message(NamedTuple):
    word: Any
    payload: Tensor | None = None
    done: Waits = Now()


class Line:
    """One connection: what is to be sent waits here, and nobody for it."""

    def __init__(self, socket: wire.Socket) -> None:
        self.socket = socket
        self._out: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        threading.Thread(target=self._write_on, name="stage-out", daemon=True).start()

    def say(self, word: Any, payload: Tensor | None = None, done: Waits | None = None) -> None:
        self._out.put(Message(word, payload, done or Now()))

    def close(self) -> None:
        self._out.put(None)

    def _write_on(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the reader finds out, too
            while (message := self._out.get()) is not None:
                message.done.synchronize()
                if message.word is not None:
                    wire.say(self.socket, message.word)
                if message.payload is not None:
                    self.socket.send_bytes(message.payload.numpy().data)


class Worker:
    """`run` on the thread that made it; everything else on any."""

    def __init__(self, kind: Kind, engine: StageEngine) -> None:
        self._kind, self._engine = kind, engine
        self._outlet = engine.outlet = Outlet(engine)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._home = wire.home_of(engine.runner.device)
        self._numbers = itertools.count()
        self._jobs: dict[tuple[Line, int], str] = {}  # requests
        self._lines: dict[str, Line] = {}  # by request

    def run(self) -> None:
        """Until something fails that is not one job's fault."""
        while True:
            self._obey()
            events = self._engine.step()
            self._outlet.send_images()
            for request_id, event in events:
                if event.finish_reason is not None:
                    self._end(request_id)

    def _obey(self) -> None:
        block = not self._engine.has_work
        while True:
            try:
                command = self._commands.get(block)
            except queue.Empty:
                return
            command()
            block = False

    # -- jobs, between two steps ----------------------------------------------------------------

    def _begin(self, line: Line, job: Job) -> None:
        request_id = f"{self._kind}-{next(self._numbers)}"
        tenant = Tenant(salt=job.salt)
        segments = job.segments
        if self._kind == "encode":
            shown = [s for s in segments if isinstance(s, ImageSegment) and not s.marked]
            segments = (*shown, TextSegment((0,)))  # a prompt has text
        request = Request(request_id, segments, NOTHING, prefill_only=True, tenant=tenant)
        self._jobs[line, job.id], self._lines[request_id] = request_id, line
        errand = Errand(job.id, job.runs, set(job.images), line.say)
        self._outlet.errands[request_id] = errand
        text = sum(len(s.token_ids) for s in segments if isinstance(s, TextSegment))
        visual = sum(image.num_tokens for image in request.images)
        try:
            self._engine.scheduler.check_admissible(request, text, visual)
        except RequestError as error:
            logger.info("a job is refused: %s", error)
            return self._end(request_id)
        self._engine.add(request)

    def _end(self, request_id: str) -> None:
        errand = self._outlet.errands.pop(request_id, None)
        line = self._lines.pop(request_id, None)
        if errand is not None and line is not None:
            self._jobs.pop((line, errand.job), None)
            line.say(End(errand.job, self.rates))

    def _cancel(self, line: Line, job: int) -> None:
        if (request_id := self._jobs.get((line, job))) is not None:
            self._engine.abort(request_id)

    def _lost(self, line: Line) -> None:
        for of, job in list(self._jobs):
            if of is line:
                self._cancel(of, job)

    @property
    def rates(self) -> Rates:
        return Rates(self._engine.costs.token_s, self._engine.costs.image_token_s)

    # -- connections ----------------------------------------------------------------------------

    def listen_on(self, listener: Any) -> None:
        while True:
            try:
                socket = listener.accept()
            except (OSError, EOFError, ProcessError) as error:
                logger.info("a connection was refused: %s", error)
                continue
            name = f"stage-in-{self._kind}"
            threading.Thread(target=self._converse, args=(socket,), name=name, daemon=True).start()

    def _converse(self, socket: wire.Socket) -> None:
        line = Line(socket)
        line.say(Hello(self._kind, self._outlet.seed, self.rates, self._home))
        try:
            while True:
                self._hear(line, wire.hear(socket))
        except (OSError, EOFError):
            self._commands.put(lambda: self._lost(line))
        finally:
            line.close()

    def _hear(self, line: Line, word: Any) -> None:
        if isinstance(word, Probe):
            line.say(None, torch.zeros(word.num_bytes, dtype=torch.uint8))
        elif isinstance(word, Job):
            self._commands.put(lambda: self._begin(line, word))
        elif isinstance(word, Cancel):
            self._commands.put(lambda: self._cancel(line, word.job))

    # -- before the first connection ------------------------------------------------------------

    def rehearse(self) -> None:
        """Run a prompt and an image twice: once to find the way, once to be measured."""
        engine = self._engine
        for seed in range(2):
            engine.costs.token_s = engine.costs.image_token_s = None
            count = min(REHEARSED, engine.max_model_len // 2, engine.scheduler.text_capacity // 2)
            text = TextSegment(tuple((7 * i + seed) % engine.vocab_size for i in range(count)))
            self._compute(text)
            if engine.least_image_tokens:
                image = engine.pipeline.prepare(_picture(seed))
                self._compute(ImageSegment(image), TextSegment((seed,)))

    def _compute(self, *segments: Any) -> None:
        name = f"rehearsal-{next(self._numbers)}"
        self._engine.add(Request(name, segments, NOTHING, prefill_only=True))
        while self._engine.has_work:
            self._engine.step()


def _picture(seed: int) -> bytes:
    """A file of an image of a usual size."""
    file = io.BytesIO()
    Image.linear_gradient("L").resize((512, 512 - seed)).convert("RGB").save(file, "PNG")
    return file.getvalue()


def run_worker(kind: Kind, address: str, config: EngineConfig, make: Make, gpu: int | None) -> None:
    """A worker's process, from its start to its end. `gpu`: its number, None for the first one or
    none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # terminals tell all; the server ends it
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    serve(kind, address, config, make, gpu)


def serve(kind: Kind, address: str, config: EngineConfig, make: Make, gpu: int | None) -> None:
    """Take jobs until something fails. Raises OSError for an address that cannot be had, ValueError
    for a model of which such a worker could make nothing, and what loading raises."""
    if gpu is not None:
        torch.cuda.set_device(gpu)
    engine = make(config, StageEngine)
    assert isinstance(engine, StageEngine)
    refuse([kind], engine.scheduler)
    worker = Worker(kind, engine)
    worker.rehearse()
    with wire.listen(address, config.stages.key) as listener:
        listen = worker.listen_on
        threading.Thread(target=listen, args=(listener,), name="stage", daemon=True).start()
        with torch.inference_mode():
            worker.run()


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(0)

"""The engine: one step = schedule, encode images, run text, sample, land.

Owns the scheduler, the runner and the live requests; all of it belongs to one thread. Knows nothing
of asyncio, JSON or sockets.

Where the runner computes on a device of its own, a step is launched before the tokens of the one
before have landed, so the device never waits for the host. What ends with a token is then seen one
step late: the token launched behind the end is dropped.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from mmserve.config import EngineConfig
from mmserve.energy import EnergyMeter
from mmserve.engine.border import Border, build_border
from mmserve.engine.build_cold import build_cold
from mmserve.engine.build_drafter import build_drafter
from mmserve.engine.build_runner import build_runner
from mmserve.engine.build_scheduler import build_scheduler
from mmserve.engine.build_tiers import build_tiers
from mmserve.engine.drafting import Drafting
from mmserve.engine.figures import Figures
from mmserve.engine.flight import Flight
from mmserve.engine.grammar import Grammars, Matcher
from mmserve.engine.image_steps import ImageSteps
from mmserve.engine.kept_paths import Keeping, KeptPath
from mmserve.engine.kv_transfer import KVTransfer, identity_of
from mmserve.engine.live import Live, Row
from mmserve.engine.live_beams import begin
from mmserve.engine.meter import board_meter, step_work
from mmserve.engine.model_runner import Logits, ModelRunner
from mmserve.engine.sampler import Drawn, SampledToken, Sampler, SamplingState
from mmserve.engine.taps import Heard
from mmserve.kvfile.file import KVFile
from mmserve.kvfile.header import KVFileError, KVMismatchError
from mmserve.metrics import Metrics
from mmserve.model.loader import LoadedModel
from mmserve.model.weights import Loaded
from mmserve.request import FinishReason, ImageSegment, Request, TokenEvent
from mmserve.scheduler.batch import Batch, Chunk
from mmserve.scheduler.page_owners import PageOwners
from mmserve.sequence import Sequence, SequenceStatus
from mmserve.spec.draft import AnyDraft
from mmserve.tiers.cost import Costs
from mmserve.tiers.kv_object import Owner

logger = logging.getLogger(__name__)

Event = tuple[str, TokenEvent]  # (request id, what happened)
Say = Callable[[SampledToken, float], TokenEvent]


class Engine:
    """Requests in (`add`, `abort`), events out (`step`)."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: Loaded,
        border: Border | None = None,
        *,
        before: Engine | None = None,
        make_runner: Callable[[Loaded, EngineConfig], ModelRunner] | None = None,
    ) -> None:
        """`border`: the model's, where it was built before the weights were loaded. `before`: an
        engine of the same that failed, whose weights, memory and figures this one goes on with."""
        self.name = loaded.name
        if isinstance(loaded, LoadedModel):
            fitted = config.cache.fitted(loaded.spec.num_image_tokens)
            config = dataclasses.replace(config, cache=fitted)
        self._loaded, self._compatible = loaded, config.cache.kv_compatible_with
        self.max_model_len = loaded.max_model_len
        self.made_of, self._faults = (config, loaded), config.faults
        self.metrics: Metrics = before.metrics if before else Metrics()
        self.energy: EnergyMeter = before.energy if before else board_meter(loaded, self.metrics)
        self.runner: ModelRunner = (
            before.runner if before else (make_runner or build_runner)(loaded, config)
        )
        self.scheduler = build_scheduler(config, self.runner, loaded.max_model_len)
        dtype = self.runner.dtype + config.cache.formats
        self.border = border = border or build_border(loaded, config, dtype=dtype)
        self.tokenizer, self.template, self.pipeline, self.least_image_tokens = border[:4]
        owner = Owner(self.kv.identity, self._compatible)
        parts, self.costs = (self.runner, self.scheduler, self.metrics), Costs()
        self.tiers = build_tiers(config, owner, *parts, self.costs)
        tier_of = self.tiers.image_tier if self.tiers is not None else lambda key: None
        cold = build_cold(config, *parts, self.costs, tier_of)
        self._figures = Figures(self.metrics, self.scheduler, self.tiers, self.costs)
        self._live: dict[str, Live] = {}
        of = self.runner, self.scheduler.holdings, self.pipeline, self.metrics
        self._images = ImageSteps(*of, self._live, self._finish, tier_of, cold)
        self.images = self._images.kv
        pools = self.runner.text, self.runner.vision
        text, vision = ([pool.shape.page_bytes for pool in of] for of in pools)
        self.page_owners = PageOwners(self.scheduler, text, vision, self.images.format_of)
        self.default_sampling = border.sampling
        # Tokens that can be chosen, and can be spoken of.
        self.vocab_size = min(self.tokenizer.vocab_size, self.runner.adapter.vocab_size)
        self.grammars = Grammars(self.tokenizer)
        self.drafting: Drafting | None = None
        if (found := build_drafter(config, self.runner, loaded)) is not None:
            figures = self.scheduler.holdings, self.metrics
            self.drafting = Drafting(found.drafter, found.length, *figures, found.control)
            self.runner.listen(found.drafter.taps, trees=found.trees)
        # One flight is in the air between two steps. May be set at any time, to compare.
        self.overlaps = self.runner.overlaps
        self._flight: Flight | None = None
        self._sampler = Sampler()
        self._outbox: list[Event] = []
        self._keeping = Keeping(self.runner.text, self.runner.move)
        self._unsaid: list[tuple[Live, SampledToken, float]] = []  # when each landed
        self.num_launched = 0  # steps

    @property
    def has_work(self) -> bool:
        busy = self.scheduler.has_work or bool(self._outbox) or self._flight is not None
        return busy or (self.tiers is not None and self.tiers.has_work)

    def add(self, request: Request, matcher: Matcher | None = None) -> None:
        """Queue an admissible request (`Scheduler.check_admissible`).

        `matcher`: of a constrained one; compiled here, while all wait, if it is missing.
        """
        constraint = request.params.constraint
        if constraint is not None and not request.prefill_only:
            matcher = matcher or self.grammars.matcher(constraint)
        scheduler = self.scheduler
        seq = Sequence(
            request,
            in_context=scheduler.in_context,
            head=scheduler.head,
            whole_prompt=scheduler.whole_prompts,
            regimes=self.runner.regimes,
        )
        images = sum(s.image.num_tokens for s in request.segments if isinstance(s, ImageSegment))
        seq.bound(min(self.max_model_len - images, self.scheduler.text_capacity))
        if seq.outgrown:
            seq.cut()
        for image in request.images:
            self.runner.touch(image.digest)
        if not self._live:
            self.energy.idle()
        parts = self.tokenizer, matcher, self.scheduler, self.runner.text
        self._live[request.id] = begin(seq, *parts)
        if self.tiers is None or not self.tiers.ask(seq):
            self.scheduler.add(seq)
        self.metrics.prompt_tokens.inc(seq.length)

    def abort(self, request_id: str) -> None:
        """End a request now; unknown or ended ids are ignored."""
        if request_id in self._live:
            self._finish(self._live[request_id], FinishReason.ABORT)

    def abort_all(self, reason: FinishReason, *why: str) -> None:
        """`why`: a message and its code, as `TokenEvent` has them."""
        for live in list(self._live.values()):
            self._finish(live, reason, *why)

    def end_running(self, reason: FinishReason, *why: str) -> None:
        """As `abort_all`, but nobody who waits."""
        for live in list(self._live.values()):
            if any(seq.status is SequenceStatus.RUNNING for seq in live.seqs):
                self._finish(live, reason, *why)

    def step(self) -> list[Event]:
        """Advance every scheduled sequence; returns what happened since the last call."""
        started = time.monotonic()
        if self.tiers is not None:
            for seq in self.tiers.ready():
                self.scheduler.add(seq)
        batch = self.scheduler.schedule(self._draft())
        flight = self._launch(batch, started) if batch else None
        self._say()
        self._land()
        self._flight = flight
        if not self.overlaps:
            self._land()
        self._settle()
        if self.tiers is not None:
            self.tiers.tick(busy=bool(batch))
        self._figures.observe(started, idle=not self._live)
        events, self._outbox = self._outbox, []
        return events

    def close(self) -> None:
        """Nothing runs any more: what is to outlive the process is written."""
        self.pipeline.close()
        if self.tiers is not None:
            self.tiers.close()
        self.runner.team.close()

    # -- KV files -------------------------------------------------------------------------------

    @cached_property
    def kv(self) -> KVTransfer:
        """The way between the pools and KV files; only between two steps."""
        runner, radix = self.runner, self.scheduler.holdings.radix
        identity = identity_of(self._loaded, runner, self.tokenizer, self.pipeline)
        pools: dict[str, Any] = {"text": runner.text, "vision": runner.vision, "radix": radix}
        return KVTransfer(identity, **pools, compatible=self._compatible)

    def collect_kv(self) -> KVFile:
        """All that is cached, copied."""
        self._land()  # a step's KV is complete then, whatever stream of a device wrote it
        self._settle()
        return self.kv.collect()

    def read_kv(self, path: Path) -> KVFile:
        """A file that these pools may take in; any thread may read it. All of a damaged or strange
        one is refused. Raises `KVFileError` or `OSError`."""
        try:
            return self.kv.read(path)
        except KVFileError as error:
            other = isinstance(error, KVMismatchError)
            self.metrics.file_refused("other_model" if other else "damaged")
            raise

    # -- parts of a step ------------------------------------------------------------------------

    def _draft(self) -> Mapping[str, AnyDraft]:
        """What to check in the next step. A draft in the air has to land before it."""
        drafting = self.drafting
        if drafting is None:
            return {}
        if self._flight is not None and self._flight.drafted:
            self._land()
        wanted = drafting.wants(self._live.values())
        if wanted:
            self._land()
        self.runner.hears = drafting.hears
        return drafting.propose(self._live) if wanted else {}

    def _launch(self, batch: Batch, started: float) -> Flight:
        """Start a step on the device; pending tokens stand for those it will choose."""
        self._keeping.settle()
        if batch.images:
            for chunk in batch.chunks:
                self._live[chunk.seq.id].clock.schedule(started)
        self.num_launched, runner = self.num_launched + 1, self.runner
        self._faults.at("engine.launch")
        batch = self._images.ahead(batch)
        for job in batch.images:
            self._images.encode(job)
        for chunk in batch.chunks:
            for context in chunk.images:
                self._images.note_context(context)
                if not chunk.seq.finished:
                    self._images.see(context.placed.key, context.placed.image)
        batch.chunks = [c for c in batch.chunks if not c.seq.finished]
        previous = self._flight.drawn.tokens if self._flight else None
        if batch.copies:
            runner.copy(batch.copies)
        logits = self._compute(batch, previous)
        runner.trim()
        self.metrics.vision_kv_writes.inc(sum(len(chunk.images) for chunk in batch.chunks))
        for chunk in batch.chunks:
            self.scheduler.advance(chunk)
            self._live[chunk.seq.id].clock.schedule(started)
        for seq in self.scheduler.ended_prefills():
            self._finish(self._live[seq.id], FinishReason.STOP)
        if logits is None:
            return Flight(batch, [], [], Drawn.nothing(runner.device), started, runner.heard)
        lives = [self._live[chunk.seq.id].row(chunk.seq) for chunk in logits.chunks]
        if any(live.matcher and live.seq.num_pending for live in lives):
            self._land()  # a grammar has to see a token before it can say what follows
        states: list[SamplingState] = []
        rows: list[int] = []  # by chunk, its first
        for live, chunk in zip(lives, logits.chunks, strict=True):
            rows.append(len(states))
            states.append(live.sampling)
            if chunk.draft is not None and self.drafting is not None:
                states += self.drafting.behind(live, chunk.draft)
        drawn = self._sampler.begin(logits.values, states, previous)
        for live, chunk, row in zip(lives, logits.chunks, rows, strict=True):
            if chunk.draft is None:  # else it is not chosen for good before it has landed
                live.sampling.spend(1)
                live.launched(row)
        drafted = self.drafting is not None and self.drafting.hears and batch.has_drafts
        return Flight(batch, logits.chunks, lives, drawn, started, self.runner.heard, drafted)

    def _compute(self, batch: Batch, previous: Any) -> Logits | None:
        return self.runner.run(batch, previous)

    def _land(self) -> None:
        """Wait for the step in the air, if any, and hand out its tokens."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        tokens = flight.drawn.land()
        self.runner.team.check()
        now = time.monotonic()
        if self.energy.enabled:  # before anybody ends: a request's last step is its own
            self.energy.share(step_work(flight.batch))
        paths = self._check(flight, tokens) if flight.drafted else {}
        for live, chunk, chosen in flight.parts(tokens):
            self._take(live, chunk, chosen, paths.get(chunk.seq.id, ()), flight.heard, now)
        seconds = self._figures.count(flight.batch, flight.started)
        if self.drafting is not None:
            self._tell(self.drafting, flight, seconds)

    def _tell(self, drafting: Drafting, flight: Flight, seconds: float) -> None:
        """A drafter hears of prompts under way, too."""
        for chunk in flight.batch.chunks:
            live = None if chunk.samples else self._live.get(chunk.seq.id)
            if live is not None and live.seq is chunk.seq:
                drafting.landed(live, chunk, flight.heard)
        drafting.stepped(flight.batch, seconds)

    def _check(self, flight: Flight, tokens: list[SampledToken]) -> dict[str, tuple[int, ...]]:
        """What was right of each draft, by sequence; it is to become text (`_settle`)."""
        paths: dict[str, tuple[int, ...]] = {}
        for live, chunk, chosen in flight.parts(tokens):
            if self.drafting is not None and chunk.draft is not None and isinstance(live, Live):
                path = self.drafting.verify(live, chunk.draft.read(), chosen)
                self._keeping.add(KeptPath(live.seq.tables, chunk.start + chunk.count, path))
                paths[chunk.seq.id] = path
        return paths

    def _take(
        self,
        live: Row,
        chunk: Chunk,
        chosen: list[SampledToken],
        path: tuple[int, ...],
        heard: Heard,
        now: float,
    ) -> None:
        """Hand out what a step has chosen for a row: one token, and as many more as its draft had
        right."""
        drafting, seq, draft = self.drafting, live.seq, chunk.draft
        ended = False
        for count, number in enumerate((-1, *path), 1):
            token = chosen[1 + number]
            # The device waits for the next step: until that is launched, only what it needs.
            if draft is not None and isinstance(live, Live) and live.accept(token.token_id):
                self._unsaid.append((live, token, now))
            else:
                if self._unsaid:
                    self._say()
                ended = self._hand_out(live, live.push, token, now)
            seq.num_computed_tokens += count <= len(path)  # what was right has been computed
            if ended:
                break
        if draft is not None:
            live.sampling.spend(count)
        # Of many that decode nobody wants to know: not even to be asked takes its time then.
        if drafting is not None and (drafting.hears or chunk.count > 1) and isinstance(live, Live):
            drafting.landed(live, chunk, heard, chosen, path)
        if ended:
            self._retire(self._live[live.request.id])
        elif isinstance(live, Live) and seq.outgrown:
            self._settle()
            live.keep_counts()
            if drafting is not None:
                drafting.end(live)
            live.sampling.forget(self.scheduler.cut(seq))

    def _settle(self) -> None:
        """What a step with drafts has left to be done while the next is under way."""
        self._keeping.settle()
        self._say()

    def _say(self) -> None:
        """Hand out tokens that were accepted while the next step was to be launched."""
        for live, token, landed in self._unsaid:
            self._hand_out(live, live.say, token, landed)
        self._unsaid.clear()

    def _hand_out(self, live: Row, say: Say, token: SampledToken, now: float) -> bool:
        """A token's event, which `say` makes; whether it is the last."""
        self._figures.observe_token(live, now)
        event = say(token, now)
        self._outbox.append((live.request.id, event))
        self.metrics.generation_tokens.inc()
        return event.finish_reason is not None

    def _finish(self, live: Live, reason: FinishReason, *why: str) -> None:
        self._settle()
        self._outbox.append((live.request.id, live.end(reason, *why)))
        self._retire(live)

    def _retire(self, live: Live) -> None:
        self._settle()
        if self.tiers is not None:
            self.tiers.note_end(live.seq)
        self.scheduler.finish(live.seq)
        if self.drafting is not None:
            self.drafting.end(live)
        del self._live[live.request.id]
        self._figures.observe_end(live)
        if self.energy.enabled:
            self.metrics.request_energy_joules.observe(self.energy.close(live.request.id))

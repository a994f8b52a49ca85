"""Speculation in the engine: which sequences get drafts, what is checked, and what comes of it.

Owns the way between live requests, a drafter and its control. Knows nothing of how drafts are
guessed (mmserve.spec), of pages or of queues.

A draft can only be made behind a token that the host knows, so a step with drafts has landed before
the next is scheduled. Steps without drafts go on overlapping.

No answer needs a drafter, so one that fails ends none: it is not asked again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from mmserve.engine.grammar import Matcher
from mmserve.engine.graphs import Graphs
from mmserve.engine.live import Live, Row
from mmserve.engine.sampler import SampledToken, SamplingState
from mmserve.engine.taps import Heard
from mmserve.metrics import Metrics
from mmserve.scheduler.batch import Batch, Chunk
from mmserve.scheduler.draft_room import draft_room
from mmserve.scheduler.holdings import Holdings
from mmserve.spec.control import Control, Kind, Outcome
from mmserve.spec.draft import AnyDraft, Draft, Unread
from mmserve.spec.drafter import Context, Drafter, Landed, Recaller, Wanted
from mmserve.spec.verify import accepted

logger = logging.getLogger(__name__)

# Where more sequences than these decode, a drafter hears of their steps only while it drafts: most
# of the time, drafts do not pay there, and telling costs as much as a small model's step.
ALWAYS_HEARD = 8
REST = 15  # steps in which nobody then even thinks of it


@dataclass
class _Course:
    """What is known of one live request. `matchers`: of a constrained one, behind each token of
    the draft in the air."""

    context: Context
    matchers: tuple[Matcher | None, ...] = ()


@dataclass
class _Try:
    """What was asked of the drafter for one sequence, and what came of it."""

    wanted: int
    rows: int = 0
    accepted: int = 0


class Drafting:
    """`length`: how far ahead a draft may reach; without `control`, always does."""

    def __init__(
        self,
        drafter: Drafter,
        length: int,
        holdings: Holdings,
        metrics: Metrics,
        control: Control | None = None,
    ) -> None:
        self.drafter, self._length, self._holdings = drafter, length, holdings
        self._metrics, self._control = metrics, control
        self._recaller = drafter if isinstance(drafter, Recaller) else None
        self._courses: dict[str, _Course] = {}
        self._planned: Mapping[str, int] = {}
        self._tries: dict[str, _Try] = {}  # of the step that is launched next, or in the air
        self._seconds = 0.0  # that its drafts took
        self._captures = 0  # before it
        self.hears = True  # whether the drafter is told of steps
        self._company: list[str] = []  # who decoded when drafts were last thought of
        self._rested = 0  # steps since then
        self._passed = 1  # steps, as of then, from the time before
        self._failed = False

    # -- before a step --------------------------------------------------------------------------

    def wants(self, lives: Iterable[Live]) -> bool:
        """Whether to land what is in the air, so that drafts can be made now."""
        if self._failed or (not self.hears and self._rested < REST):
            self._rested += 1
            return False
        ready = [live for live in lives if live.decodes]
        names = [live.request.id for live in ready]
        if self._control is None:
            self._planned = dict.fromkeys(names, self._length)
            return bool(self._planned)
        if self._rested < self._control.rests and names == self._company:
            self._rested += 1
            return False
        self._passed, self._rested, self._company = self._rested + 1, 0, names
        few = len(ready) <= ALWAYS_HEARD
        kinds = [(name, self._kind(live, few)) for name, live in zip(names, ready, strict=True)]
        self._planned = self._control.plan(kinds, self._passed)
        self.hears = few or bool(self._planned)
        return bool(self._planned)

    def _kind(self, live: Live, few: bool) -> Kind:
        """Where there are many, nobody looks into what is remembered."""
        if few and self._recaller is not None:
            with self._careful():
                if self._recaller.recalls(self._course(live).context):
                    return Kind.RECALLED
        return Kind.IMAGE if live.seq.images else Kind.TEXT

    def propose(self, lives: Mapping[str, Live]) -> Mapping[str, AnyDraft]:
        """Drafts for what has landed, by request."""
        wanted: dict[str, Wanted] = {}
        rooms: dict[str, int] = {}
        for name, length in self._planned.items():
            live = lives.get(name)
            rooms[name] = room = draft_room(live.seq, self._holdings) if live is not None else 0
            length = min(length, room)
            if live is not None and length > 0:
                wanted[name] = Wanted(self._course(live).context, length)
        self._tries = {name: _Try(want.length) for name, want in wanted.items()}
        if not wanted:
            return {}
        started = time.monotonic()
        drafts: Sequence[AnyDraft | None] = [None] * len(wanted)
        with self._careful():
            drafts = self.drafter.propose(list(wanted.values()))
        found: dict[str, AnyDraft] = {}
        for (name, want), draft in zip(wanted.items(), drafts, strict=True):
            if isinstance(draft, Unread):
                if lives[name].sampling.plain and draft.length <= rooms[name]:
                    found[name] = draft
                    continue
                draft = draft.read()
            known = draft and draft.shortened(want.length)
            if known is not None:
                known, self._courses[name].matchers = _possible(known, lives[name])
            if known is not None:
                found[name] = known
        self._seconds = time.monotonic() - started
        return found

    def behind(self, live: Row, draft: AnyDraft) -> list[SamplingState]:
        """How the token behind each of a draft's is chosen."""
        if live.sampling.plain:
            return [live.sampling] * len(draft)
        matchers, paths = self._courses[live.request.id].matchers, draft.read().paths
        return [live.sampling.behind(*state) for state in zip(paths, matchers, strict=True)]

    # -- after a step ---------------------------------------------------------------------------

    def verify(self, live: Live, draft: Draft, chosen: Sequence[SampledToken]) -> tuple[int, ...]:
        """The numbers of the draft's tokens that are right; they are counted."""
        path = accepted(draft, [token.token_id for token in chosen])
        name = draft.author or self.drafter.name
        self._metrics.drafted(name, bool(live.seq.images), len(draft), len(path))
        live.clock.drafted += len(draft)
        live.clock.accepted += len(path)
        if tried := self._tries.get(live.request.id):
            tried.rows, tried.accepted = len(draft), len(path)
        return path

    def landed(
        self,
        live: Live,
        chunk: Chunk,
        heard: Heard,
        chosen: Sequence[SampledToken] = (),
        path: tuple[int, ...] = (),
    ) -> None:
        """The sequence has what a step made of it."""
        if chunk.decodes and not self.hears:
            return
        tokens = tuple(token.token_id for token in chosen)
        draft = None if chunk.draft is None else chunk.draft.read()
        landed = Landed(draft, tokens, path, *_features(chunk, heard, path))
        if not self._failed:
            with self._careful():
                self.drafter.landed(self._course(live).context, landed)

    def stepped(self, batch: Batch, seconds: float) -> None:
        """A whole step has landed, `seconds` after the one before, or after it was begun."""
        tries, self._tries = self._tries, {}
        if self._control is None:
            return
        before, self._captures = self._captures, Graphs.captures
        if self._rested:
            return  # the next that is looked at stands for it
        usual = before == self._captures and not batch.images
        alone = usual and all(chunk.decodes for chunk in batch.chunks)
        outcomes = [Outcome(n, t.wanted, t.rows, t.accepted) for n, t in tries.items()]
        saved = self._control.stepped(
            seconds if alone else None,
            len(batch.chunks),
            outcomes,
            self._seconds if tries else 0.0,
            alike=self._passed,
        )
        self._metrics.spec_decode_seconds_saved.inc(saved)

    def end(self, live: Live) -> None:
        """Nothing more comes of a request, or nothing of it as it is laid out now."""
        course = self._courses.pop(live.request.id, None)
        if course is not None and not self._failed:
            with self._careful():
                self.drafter.end(course.context)
        if self._control is not None:
            self._control.forget(live.request.id)

    @contextmanager
    def _careful(self) -> Iterator[None]:
        """Around each call of the drafter."""
        try:
            yield
        except Exception:
            logger.exception("drafting by %s failed, and is off from now on", self.drafter.name)
            self._failed, self.hears = True, False

    def _course(self, live: Live) -> _Course:
        request, seq = live.request, live.seq
        course = self._courses.get(request.id)
        if course is None:
            images = tuple(dict.fromkeys(placed.image.whole.digest for placed in seq.images))
            salt, tokens = request.tenant.salt, seq.token_ids
            context = Context(request.id, tokens, seq.num_prompt_tokens, images, salt)
            course = self._courses[request.id] = _Course(context)
        return course


def _features(
    chunk: Chunk, heard: Heard, path: tuple[int, ...]
) -> tuple[int, Tensor | None, Sequence[int] | None]:
    """Where the tokens begin that are now known and computed, and of which rows they are: nothing
    is copied, for most steps are of no use to anybody."""
    parts = heard.get(chunk.seq)
    if not parts:
        return 0, None, None
    first, features, start, end = parts[0]
    if chunk.draft is not None:
        return first, features, [start + row for row in (0, *(1 + number for number in path))]
    if len(parts) == 1:
        return first, features, range(start, end)
    return first, torch.cat([part.rows for part in parts]), None


def _possible(draft: Draft, live: Live) -> tuple[Draft | None, tuple[Matcher | None, ...]]:
    """Without tokens that end the answer, or that its grammar does not allow, and what follows
    them; the grammar behind each of those that are left."""
    behind: dict[int, Matcher | None] = {-1: live.matcher}
    for number, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if parent not in behind or live.ends_at(token):
            continue
        matcher = behind[parent]
        if matcher is not None and (matcher := matcher.fork(token)) is None:
            continue
        behind[number] = matcher
    return draft.only(behind), tuple(behind[n] for n in behind if n >= 0)

"""Speculation in the engine: which sequences get drafts, what is checked, and what comes of it.

Owns the way between live requests and a drafter. Knows nothing of how drafts are guessed
(mmserve.spec), of pages or of queues.

A draft can only be made behind a token that the host knows, so a step with drafts has landed before
the next is scheduled. Steps without drafts go on overlapping.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mmserve.engine.grammar import Matcher
from mmserve.engine.live import Live, Row
from mmserve.engine.sampler import SampledToken, SamplingState
from mmserve.metrics import Metrics
from mmserve.scheduler.batch import Chunk
from mmserve.scheduler.draft_room import draft_room
from mmserve.scheduler.holdings import Holdings
from mmserve.spec.draft import Draft
from mmserve.spec.drafter import Context, Drafter, Landed, Wanted
from mmserve.spec.verify import accepted


@dataclass
class _Course:
    """What is known of one live request. `matchers`: of a constrained one, behind each token of
    the draft in the air."""

    context: Context
    matchers: tuple[Matcher | None, ...] = ()


class Drafting:
    """`length`: how far ahead a draft may reach."""

    def __init__(self, drafter: Drafter, length: int, holdings: Holdings, metrics: Metrics) -> None:
        self.drafter, self._length, self._holdings = drafter, length, holdings
        self._metrics = metrics
        self._courses: dict[str, _Course] = {}

    def wants(self, lives: Iterable[Live]) -> bool:
        """Whether to land what is in the air, so that drafts can be made now."""
        return any(live.decodes for live in lives)

    def propose(self, lives: Iterable[Live]) -> Mapping[str, Draft]:
        """Drafts for what has landed, by request."""
        wanted: list[tuple[Live, Wanted]] = []
        for live in lives:
            length = min(self._length, draft_room(live.seq, self._holdings))
            if length > 0:
                wanted.append((live, Wanted(self._course(live).context, length)))
        if not wanted:
            return {}
        drafts = self.drafter.propose([asked for _, asked in wanted])
        found = {}
        for (live, asked), draft in zip(wanted, drafts, strict=True):
            if draft is not None and (draft := draft.shortened(asked.length)) is not None:
                draft, self._course(live).matchers = _possible(draft, live)
                if draft is not None:
                    found[live.request.id] = draft
        return found

    def behind(self, live: Row, draft: Draft) -> list[SamplingState]:
        """How the token behind each of a draft's is chosen."""
        if live.sampling.plain:
            return [live.sampling] * len(draft)
        matchers = self._courses[live.request.id].matchers
        return [live.sampling.behind(*state) for state in zip(draft.paths, matchers, strict=True)]

    def verify(self, live: Live, draft: Draft, chosen: list[SampledToken]) -> tuple[int, ...]:
        """The numbers of the draft's tokens that are right; they are counted."""
        path = accepted(draft, [token.token_id for token in chosen])
        self._metrics.drafted(self.drafter.name, bool(live.seq.images), len(draft), len(path))
        live.clock.drafted += len(draft)
        live.clock.accepted += len(path)
        return path

    def landed(
        self, live: Live, chunk: Chunk, chosen: list[SampledToken], path: tuple[int, ...] = ()
    ) -> None:
        """The sequence has what a step made of it."""
        tokens = tuple(token.token_id for token in chosen)
        self.drafter.landed(self._course(live).context, Landed(chunk.draft, tokens, path))

    def end(self, live: Live) -> None:
        """Nothing more comes of a request, or nothing of it as it is laid out now."""
        course = self._courses.pop(live.request.id, None)
        if course is not None:
            self.drafter.end(course.context)

    def _course(self, live: Live) -> _Course:
        request, seq = live.request, live.seq
        course = self._courses.get(request.id)
        if course is None:
            images = tuple(dict.fromkeys(placed.image.whole.digest for placed in seq.images))
            context = Context(
                request.id, seq.token_ids, seq.num_prompt_tokens, images, request.salt
            )
            course = self._courses[request.id] = _Course(context)
        return course


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

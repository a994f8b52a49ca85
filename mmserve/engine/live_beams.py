"""A request that is answered by beam search, on its way through the engine.

Owns what joins the search (scores) to the beams (pages) and to text: each beam's place in a
grammar, and the one event that has all answers. Knows nothing of tensors or queues.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seqs
from dataclasses import dataclass, replace

from mmserve.cache.kv_pool import TextKVPool
from mmserve.engine.beam_search import BeamSearch, Path, Whole
from mmserve.engine.detokenizer import IncrementalDetokenizer, StopChecker
from mmserve.engine.grammar import Matcher
from mmserve.engine.live import Clock, Live
from mmserve.engine.sampler import SampledToken, SamplingState
from mmserve.request import Choice, FinishReason, Request, TokenEvent, TokenLogprob, Usage
from mmserve.scheduler.admission import beam_limit
from mmserve.scheduler.beams import Beams, SharedKV
from mmserve.scheduler.scheduler import Scheduler
from mmserve.sequence import Sequence
from mmserve.tokenizer import Tokenizer

LOOK_EVERY = 8  # steps; what beams share takes a look at every page


@dataclass(eq=False)
class Beam:
    """One beam's row of a step; what `Live` is to a request of its own."""

    owner: LiveBeams
    seq: Sequence
    matcher: Matcher | None
    sampling: SamplingState

    @property
    def request(self) -> Request:
        return self.seq.request

    @property
    def clock(self) -> Clock:
        return self.owner.clock

    def launched(self, row: int) -> None:
        """Nothing is computed of a beam before it is known which go on."""

    def push(self, sampled: SampledToken, now: float) -> TokenEvent:
        return self.owner.take(self.seq, sampled, now)


class LiveBeams(Live):
    """`page_bytes` by layer group.

    What a step has found of a beam is not heard where the beam has been preempted meanwhile: it
    will be found again."""

    def __init__(
        self,
        seq: Sequence,
        tokenizer: Tokenizer,
        matcher: Matcher | None,
        beams: Beams,
        page_bytes: Seqs[int],
    ) -> None:
        super().__init__(seq, tokenizer, matcher)
        params = self.request.params
        assert params.beams is not None
        if matcher is not None:  # one that is complete allows nothing else
            self._ends |= tokenizer.eos_token_ids
        limit = seq.token_limit - seq.num_prompt_tokens
        self._stops = tuple(stop.encode() for stop in params.stop)
        self._search = BeamSearch(params.beams, self._ends, limit, self._stopped)
        wanted = max(self._search.num_wanted, params.logprobs or 0)
        self._asking = replace(params, temperature=0.0, logprobs=wanted, seed=None)
        self._beams, self._page_bytes = beams, page_bytes
        self._matchers = [matcher]  # of each running answer
        self._found: dict[Sequence, SampledToken] = {}
        self._spoken = 0  # tokens of the answers, at the end
        self._steps = 0
        self.shared = SharedKV()  # summed over the steps that are looked at

    @property
    def seqs(self) -> list[Sequence]:
        return self._beams.members(self.seq)

    def row(self, seq: Sequence) -> Beam:
        members = self.seqs
        # A root that was there only for its beams to be computed behind is none of them.
        matcher = self._matchers[members.index(seq)] if seq in members else None
        state = SamplingState(self._asking, seq.token_ids, seq.num_prompt_tokens, matcher)
        return Beam(self, seq, matcher, state)

    def take(self, seq: Sequence, sampled: SampledToken, now: float) -> TokenEvent:
        """What comes next of a beam; once it is known of all, they go on."""
        members = self.seqs
        if seq in members and seq.num_computed_tokens == seq.num_tokens:
            self._found[seq] = sampled
        if any(member not in self._found for member in members):
            return TokenEvent()
        if self.clock.first_token is None:
            self.clock.first_token = now
        self.clock.last_token = now
        if self._steps % LOOK_EVERY == 1:  # not while the prompt is alone
            self.shared = self.shared.plus(self._beams.shared(self.seq, self._page_bytes))
        self._steps += 1
        found = [self._found[member] for member in members]
        self._found = {}
        picks = self._search.step(found)
        if not picks:
            return self._end(now)
        matchers = []
        for row, token in picks:
            matcher = self._matchers[row]
            matcher = None if matcher is None else matcher.copy()
            stuck = None if matcher is None else matcher.accept(token)
            if stuck is not None:
                return self.end(FinishReason.ERROR, stuck)
            matchers.append(matcher)
        self._matchers = matchers
        self._beams.branch(self.seq, [(members[row], token) for row, token in picks])
        return TokenEvent()

    def usage(self) -> Usage:
        saved = self.shared.saved
        return replace(super().usage(), completion_tokens=self._spoken, beam_kv_saved=saved)

    def _end(self, now: float) -> TokenEvent:
        choices = tuple(map(self._choice, self._search.best()))
        if not choices:
            return self.end(FinishReason.ERROR, "No answer fits the grammar.")
        self._spoken = sum(len(choice.token_ids) for choice in choices)
        best = choices[0]
        return TokenEvent(
            text=best.text,
            token_ids=best.token_ids,
            logprobs=best.logprobs,
            finish_reason=best.finish_reason,
            usage=self.usage(),
            timings=self.clock.timings(now),
            choices=choices,
        )

    def _choice(self, whole: Whole) -> Choice:
        tokens, wanted = whole.path.tokens(), self.request.params.logprobs
        ids = tuple(token.token_id for token in tokens)
        said = ids[:-1] if ids[-1] in self._ends else ids
        speech, stop = IncrementalDetokenizer(self.tokenizer), StopChecker(self.request.params.stop)
        text, met = stop.push(speech.push(said) + speech.flush())
        logprobs: list[TokenLogprob] = []
        for token in tokens if wanted is not None else ():
            logprobs += self._logprobs(token._replace(top=token.top[:wanted]))
        text += "" if met else stop.flush()
        return Choice(text, ids, tuple(logprobs), whole.reason, whole.value)

    def _stopped(self, path: Path) -> bool:
        """Whether a stop string is complete with an answer's last token."""
        if not self._stops:
            return False
        text, new = b"", self._bytes(path.token_id)
        for token in path.back():
            text = self._bytes(token.token_id) + text
            if len(text) >= max(map(len, self._stops)) - 1 + len(new):
                break
        return any(stop in text for stop in self._stops)

    def _bytes(self, token: int) -> bytes:
        return b"" if self.tokenizer.is_special(token) else self.tokenizer.token_bytes(token)


def begin(
    seq: Sequence,
    tokenizer: Tokenizer,
    matcher: Matcher | None,
    scheduler: Scheduler,
    text: Iterable[TextKVPool],
) -> Live:
    """A request of either kind, bounded by what its beams find room for."""
    if seq.request.params.beams is None or seq.request.prefill_only:
        return Live(seq, tokenizer, matcher)
    seq.bound(beam_limit(scheduler.holdings, seq.request, seq.num_prompt_tokens))
    sizes = [pool.shape.page_bytes for pool in text]
    return LiveBeams(seq, tokenizer, matcher, scheduler.beams, sizes)

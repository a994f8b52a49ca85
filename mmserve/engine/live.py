"""One request on its way through the engine: from sampled tokens to the events that leave.

Owns the request's text state (detokenizer, stop strings), its end, its clock and its counts. Knows
nothing of pages, tensors or queues.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Protocol

from mmserve.engine.detokenizer import IncrementalDetokenizer, StopChecker
from mmserve.engine.grammar import Matcher
from mmserve.engine.sampler import SampledToken, SamplingState
from mmserve.request import FinishReason, Request, Timings, TokenEvent, TokenLogprob, Usage
from mmserve.sequence import Sequence, SequenceStatus
from mmserve.tokenizer import Tokenizer


@dataclass
class Clock:
    """Times of one request in seconds of `time.monotonic`."""

    arrival: float
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    image_s: float = 0.0  # spent on images of this request
    drafted: int = 0  # tokens
    accepted: int = 0

    def schedule(self, now: float) -> None:
        """The request is in a step; the first time counts."""
        if self.scheduled is None:
            self.scheduled = now

    def timings(self, now: float) -> Timings:
        scheduled = self.scheduled or now
        first = self.first_token or now
        return Timings(
            queue_ms=1e3 * (scheduled - self.arrival),
            image_ms=1e3 * self.image_s,
            prompt_ms=1e3 * (first - scheduled),
            predicted_ms=1e3 * (now - first),
            drafted=self.drafted,
            accepted=self.accepted,
        )


class Row(Protocol):
    """What a step chooses a token for."""

    @property
    def request(self) -> Request: ...
    @property
    def seq(self) -> Sequence: ...
    @property
    def matcher(self) -> Matcher | None: ...
    @property
    def sampling(self) -> SamplingState: ...
    @property
    def clock(self) -> Clock: ...
    def launched(self, row: int) -> None: ...
    def push(self, sampled: SampledToken, now: float) -> TokenEvent: ...


@dataclass
class Live:
    """A request in the engine. `matcher`: of a constrained one."""

    seq: Sequence
    tokenizer: Tokenizer
    matcher: Matcher | None = None
    sampling: SamplingState = field(init=False)
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        seq = self.seq
        params, prompt = self.request.params, seq.num_prompt_tokens
        self.sampling = SamplingState(params, seq.token_ids, prompt, self.matcher)
        self.clock = Clock(self.request.arrival)
        self._asked: Usage | None = None  # the prompt's counts, once it has been cut
        self._detokenizer = IncrementalDetokenizer(self.tokenizer)
        self._stop = StopChecker(params.stop)
        self._ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self._ends |= self.tokenizer.eos_token_ids

    @property
    def request(self) -> Request:
        return self.seq.request

    @property
    def seqs(self) -> list[Sequence]:
        """Those that compute it."""
        return [self.seq]

    def row(self, seq: Sequence) -> Row:
        """What a step makes of one of the request's sequences, which is its only one."""
        return self

    def launched(self, row: int) -> None:
        """The next token is number `row` of those that a step chooses."""
        if not self.seq.finished:
            self.seq.append_pending(row)

    @property
    def decodes(self) -> bool:
        """Whether its last token is all that is left to compute."""
        left = self.seq.num_tokens - self.seq.num_computed_tokens
        alone = self.request.params.beams is None
        return alone and left == 1 and self.seq.status is SequenceStatus.RUNNING

    def ends_at(self, token: int) -> bool:
        """Whether an answer ends with this token."""
        return token in self._ends or token in self.tokenizer.eos_token_ids

    def accept(self, token: int) -> bool:
        """Add a token to the text, to be said later (`say`); False, and nothing is done, where the
        answer may end with it."""
        seq = self.seq
        worded = self.matcher is not None or self.request.params.stop
        if worded or seq.num_pending or token in self._ends:
            return False
        if len(seq.token_ids) + 1 >= seq.token_limit:
            return False
        seq.append(token)
        return True

    def say(self, sampled: SampledToken, now: float) -> TokenEvent:
        """Of a token that was accepted and landed `now`."""
        return self._event(sampled, now, self._detokenizer.push([sampled.token_id]))

    def push(self, sampled: SampledToken, now: float) -> TokenEvent:
        """Take the token that landed `now`; the event has a finish reason if it is the last."""
        seq, token = self.seq, sampled.token_id
        if seq.num_pending:
            seq.settle(token)
        else:
            seq.append(token)
        ends = token in self._ends
        if self.matcher is not None:
            stuck = self.matcher.accept(token)
            if stuck is not None and token not in seq.request.params.stop_token_ids:
                return self.end(FinishReason.ERROR, stuck)
            # A complete grammar allows nothing but the end, even where the request ignores it.
            ends = ends or token in self.tokenizer.eos_token_ids
        text, stop = "" if ends else self._detokenizer.push([token]), None
        if seq.request.params.stop:
            text, stop = self._stop.push(text)
        reason = FinishReason.STOP if ends or stop is not None else None
        if reason is None and len(seq.token_ids) - seq.num_pending >= seq.token_limit:
            reason = FinishReason.LENGTH
        if reason is not None and stop is None:
            rest, stop = self._stop.push(self._detokenizer.flush())
            text += rest if stop is not None else rest + self._stop.flush()
        return self._event(sampled, now, text, reason, stop)

    def _event(
        self,
        sampled: SampledToken,
        now: float,
        text: str,
        reason: FinishReason | None = None,
        stop: str | None = None,
    ) -> TokenEvent:
        if self.clock.first_token is None:
            self.clock.first_token = now
        self.clock.last_token = now
        return TokenEvent(
            text=text,
            token_ids=(sampled.token_id,),
            logprobs=() if sampled.logprob is None else self._logprobs(sampled),
            finish_reason=reason,
            stop_string=stop,
            usage=self.usage() if reason else None,
            timings=self.clock.timings(now) if reason else None,
        )

    def end(
        self, reason: FinishReason, error: str | None = None, code: str | None = None
    ) -> TokenEvent:
        """The last event of a request that ends without a token."""
        return TokenEvent(
            text=self._stop.flush() if reason is FinishReason.ABORT else "",
            finish_reason=reason,
            usage=self.usage(),
            timings=self.clock.timings(time.monotonic()),
            error=error,
            code=code,
        )

    def keep_counts(self) -> None:
        """Of the prompt, as it is: it is about to be cut."""
        self._asked = self._asked or self._count()

    def usage(self) -> Usage:
        seq = self.seq
        return replace(
            self._asked or self._count(),
            completion_tokens=seq.num_output_tokens,
            dropped_tokens=seq.num_dropped_tokens,
            dropped_images=seq.num_dropped_images,
            vision_kv_dtype=seq.coarsest,
        )

    def _count(self) -> Usage:
        """What is known of the prompt."""
        seq = self.seq
        computed = {p.key: p.image.num_tokens for p in seq.images if p.key in seq.missing_images}
        cached_images = seq.num_image_tokens - sum(computed.values())
        found = seq.images_found
        return Usage(
            prompt_tokens=seq.num_prompt_tokens + seq.num_image_tokens,
            image_tokens=seq.num_image_tokens,
            cached_tokens=seq.num_cached_tokens + cached_images,
            cached_image_tokens=cached_images,
            vision_hits=sum(found),
            vision_misses=len(found) - sum(found),
            vision_mode=None if seq.head is None else "blend",
        )

    def _logprobs(self, sampled: SampledToken) -> tuple[TokenLogprob, ...]:
        assert sampled.logprob is not None
        top = tuple((token, self._text(token), value) for token, value in sampled.top)
        text = self._text(sampled.token_id)
        return (TokenLogprob(sampled.token_id, text, sampled.logprob, top),)

    def _text(self, token: int) -> str:
        return self.tokenizer.token_bytes(token).decode("utf-8", "replace")

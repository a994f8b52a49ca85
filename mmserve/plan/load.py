"""What traffic comes to on one of several equal replicas: batch, busy share, first tokens.

Owns the balance of arrivals and work. Knows no formula of work itself: that is the roofline's.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmserve.plan.roofline import Pools, Roofline
from mmserve.plan.traffic import Traffic

ROUNDS = 60  # of halving and of settling: more digits than a float has


@dataclass(frozen=True)
class Balance:
    """Of one replica. Times are seconds; `batch` sequences decode at once on average."""

    requests_per_s: float
    most_requests_per_s: float  # with the largest batch
    batch: float
    most_batch: int
    step_s: float
    first_new_s: float  # alone: a first turn, no image known
    first_known_s: float  # alone: a first turn, all images known
    first_last_s: float  # alone: the last turn
    first_loaded_s: float  # a mean turn, with what it waits for; at most what waiting for one is
    tokens_per_s: float  # of all conversations
    session_tokens_per_s: float

    @property
    def busy(self) -> float:
        return self.requests_per_s / self.most_requests_per_s


class _Work:
    """Mean work of a turn."""

    def __init__(self, roofline: Roofline, traffic: Traffic) -> None:
        self._roofline, self._traffic = roofline, traffic
        images = traffic.images * roofline.model.sizes.image_tokens
        self.context = traffic.text_tokens((traffic.turns + 1) / 2) + images  # tokens, on average
        new = traffic.images * traffic.new_share / traffic.turns
        known = self.context - traffic.prompt_tokens - new * roofline.model.sizes.image_tokens
        self.first = roofline.first_token_seconds(traffic.prompt_tokens, new, max(known, 0.0))

    def step(self, batch: float) -> float:
        return self._roofline.step_seconds(batch, self.context)

    def rate(self, batch: float) -> float:
        """Turns a second that keep `batch` sequences decoding."""
        return 1 / (self.first + self._traffic.output_tokens * self.step(batch) / batch)

    def batch(self, rate: float, most: float) -> float:
        """Sequences that decode at once at `rate` turns a second."""
        if rate >= self.rate(most):
            return most
        low, high = 0.0, most
        for _ in range(ROUNDS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.rate(middle) < rate else (low, middle)
        return high

    def answer(self, batch: float, rate: float) -> float:
        """Seconds of a whole answer."""
        prefilling = min(rate * self.first, 0.99)  # the rest of the time decodes
        return self.first + self._traffic.output_tokens * self.step(max(batch, 1)) / (
            1 - prefilling
        )


def balance(
    roofline: Roofline, traffic: Traffic, pools: Pools, replicas: int, max_num_seqs: int
) -> Balance:
    """`traffic` over `replicas`. Raises ValueError where not one conversation fits."""
    most = min(max_num_seqs, pools.sessions)
    if most < 1:
        raise ValueError("the text pool is too small for one whole conversation")
    work = _Work(roofline, traffic)
    rate = (traffic.requests_per_s or 0.0) / replicas
    if traffic.sessions is not None:
        rate = _rate_of_sessions(work, traffic.sessions / replicas, traffic.think_s, most)
    batch = work.batch(rate, most)
    step = work.step(max(batch, 1.0))
    waiting = min(rate * work.first, 0.99)
    alone = roofline.first_token_seconds
    prompt = traffic.prompt_tokens
    shown = traffic.images * roofline.model.sizes.image_tokens
    return Balance(
        requests_per_s=rate,
        most_requests_per_s=work.rate(most),
        batch=batch,
        most_batch=most,
        step_s=step,
        first_new_s=alone(prompt, traffic.images),
        first_known_s=alone(prompt, 0, shown),
        first_last_s=alone(prompt, 0, shown + traffic.text_tokens(traffic.turns - 1)),
        # One queue of equal works, and half of the step that goes on.
        first_loaded_s=work.first + waiting * work.first / (2 - 2 * waiting) + step / 2,
        tokens_per_s=min(rate, work.rate(most)) * traffic.output_tokens,
        session_tokens_per_s=(1 - waiting) / step,
    )


def _rate_of_sessions(work: _Work, sessions: float, think_s: float, most: float) -> float:
    """Turns a second of so many conversations, each of which waits for its answer."""
    low, high = 0.0, work.rate(most)
    for _ in range(ROUNDS):
        rate = (low + high) / 2
        open_now = rate * (think_s + work.answer(work.batch(rate, most), rate))
        low, high = (rate, high) if open_now < sessions else (low, rate)
    return high

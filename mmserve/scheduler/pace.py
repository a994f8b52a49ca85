"""How much a step may hold so that promised times are kept, and what is refused before they break.

Owns what steps of some size were measured to take, and what follows from that for two targets: the
time to a request's first token, and the time between two tokens. No clock, no tensors; knows
nothing of pages.

Between tokens: where anybody decodes, a step has as many rows and images as are expected to stay
within the target, and as many sequences are seated as leave room for a prompt beside them. A size
that was never measured is approached by doubling. To the first token: prompts are computed in
order, so a new one waits for all that is left of those before it, and for a seat. Who would have to
wait for longer than the target is refused; nobody is where there is a seat and nothing waits, since
then it is as good as it gets. A target that even the smallest step breaks is not kept, but all goes
on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mmserve.config import SchedulerConfig
from mmserve.errors import OverloadedError
from mmserve.sequence import Sequence
from mmserve.spec.costs import Curve

MARGIN = 0.85  # of a target is planned with: steps of one size differ
LEAST_ROWS = 16  # of prompts in a step, so that they get on whatever the target
FIRST_ROWS = 64  # of a step when nothing was measured yet
NEWEST = 0.1  # share of the newest measurement in a mean


@dataclass(frozen=True)
class Waiting:
    """What is before a new request: rows of prompts that have not been computed (`Pace.weigh`),
    requests without a first token, and all requests."""

    rows: int
    unanswered: int
    requests: int


class Pace:
    """Measured on the engine's thread; `check` may be asked on any."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._curve, self._steps = Curve(), 0
        self._image_s = 0.0  # of one image beside a step's rows
        self._seated_s = 0.0  # of one request from its seat to its end
        self._decoding = 0  # sequences, in the last step
        self.left: Mapping[str, int] = {}  # by request: tokens of its prompt still to be computed

    @classmethod
    def of(cls, config: SchedulerConfig) -> Pace | None:
        """None where nothing was promised."""
        return cls(config) if config.slo_ttft_s or config.slo_itl_s else None

    # -- what was measured ------------------------------------------------------------------------

    def measured(self, rows: int, images: int, seconds: float) -> None:
        """A step has taken so long."""
        self._steps += 1
        if not images:
            return self._curve.add(max(rows, 1), seconds, self._steps) if rows else None
        known = self._curve.at(rows) if rows else 0.0
        each = max(seconds - (known or 0.0), 0.0) / images
        self._image_s += (each - self._image_s) * (NEWEST if self._image_s else 1.0)

    def ended(self, seconds: float) -> None:
        """A request has ended so long after it was first computed."""
        self._seated_s += (seconds - self._seated_s) * (NEWEST if self._seated_s else 1.0)

    def _seconds(self, rows: int) -> float:
        """What a step is expected to take; 0 while nothing is known."""
        return self._curve.at(rows) or 0.0

    # -- what a step may hold ---------------------------------------------------------------------

    def plan(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> tuple[int, int]:
        """Rows of the next step, and how many images are encoded in it, at most."""
        config, running = self._config, list(running)
        self._decoding = sum(bool(seq.num_output_tokens) for seq in running)
        self.left = {
            seq.id: self._left(seq)
            for seq in (*running, *waiting)
            if not (seq.num_output_tokens or seq.request.prefill_only)
        }
        if not self._decoding or not config.slo_itl_s:
            return config.max_num_batched_tokens, 0
        rows = max(self._feasible, self._decoding + LEAST_ROWS)
        return min(rows, config.max_num_batched_tokens), self._image_rows

    def _left(self, seq: Sequence) -> int:
        text = seq.num_tokens - seq.num_computed_tokens
        images = 0 if seq.images_ready else len(seq.images)
        return self.weigh(text, images * (seq.num_image_tokens // max(len(seq.images), 1)), images)

    def weigh(self, text: int, visual: int, images: int) -> int:
        """The rows of a step that a prompt is worth: of text and visual tokens, and of images that
        take longer than their tokens alone."""
        return text + max(visual, images * self._image_rows)

    @property
    def _image_rows(self) -> int:
        """That would take as long as one image beside them."""
        many, few = self._config.max_num_batched_tokens, LEAST_ROWS
        row_s = (self._seconds(many) - self._seconds(few)) / max(many - few, 1)
        return min(int(self._image_s / row_s), many) if row_s > 0 else 0

    @property
    def _feasible(self) -> int:
        """The most rows that a step may have by the target between tokens; 0: none."""
        known = max(FIRST_ROWS, int(2 * self._curve.largest))
        low, high = 0, min(known, self._config.max_num_batched_tokens)
        while low < high:
            middle = (low + high + 1) // 2
            if self._seconds(middle) <= MARGIN * self._config.slo_itl_s:
                low = middle
            else:
                high = middle - 1
        return low

    @property
    def seats(self) -> int:
        """Sequences that run at once."""
        most = self._config.max_num_seqs
        if not self._config.slo_itl_s:
            return most
        return min(max(self._feasible - max(LEAST_ROWS, self._image_rows), 1), most)

    # -- what is refused --------------------------------------------------------------------------

    def first_token_s(self, asked: int, before: Waiting) -> float:
        """When the first token of a prompt of so many rows is expected, from now."""
        rows = self._config.max_num_batched_tokens
        if self._config.slo_itl_s and before.requests > before.unanswered:
            rows = max(self._feasible, self._decoding + LEAST_ROWS)
        step_s = self._seconds(rows)
        steps = math.ceil((before.rows + asked) / max(rows - self._decoding, LEAST_ROWS))
        leaving = max(before.requests + 1 - self.seats, 0)  # before there is a seat
        return steps * step_s + leaving * self._seated_s / self.seats

    def check(self, asked: int, before: Waiting) -> None:
        """Whether a prompt of so many rows (`weigh`) is taken. Raises `OverloadedError`."""
        target = self._config.slo_ttft_s
        at_once = not before.unanswered and before.requests < self.seats
        if not target or at_once:
            return
        expected = self.first_token_s(asked, before)
        if expected > MARGIN * target:
            raise OverloadedError(
                f"The first token would be expected in {expected:.2g} s; the target is "
                f"{target:g} s.",
                retry_after_s=expected - MARGIN * target,
            )

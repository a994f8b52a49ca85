"""What of a new request other processes are to compute: its images, or all but its prompt's end.

Owns the choice for one request, by what is measured of both sides. Knows nothing of how objects
come, or of what becomes of them: they come up like those of a tier (`Lifter`), and what does not
come is computed here. On the engine's thread only.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seqs
from dataclasses import dataclass

from mmserve.engine.kv_lift import Lifter
from mmserve.handover import choice
from mmserve.handover.choice import Here
from mmserve.handover.client import Client, Order
from mmserve.handover.stages import Stages
from mmserve.handover.wire import Kind
from mmserve.metrics import Metrics
from mmserve.placed import PlacedImage
from mmserve.scheduler.scheduler import Scheduler
from mmserve.sequence import Sequence as Seq
from mmserve.tiers.cost import Costs
from mmserve.tiers.names import image_name
from mmserve.tiers.stack import Fetch

PATIENCE = 4.0  # times what was expected; then the rest is computed here
LEAST_PATIENCE_S, MOST_PATIENCE_S = 2.0, 20.0
MOST_HELD = 4 << 30  # bytes beside the pools, of requests that have not been admitted yet


@dataclass(frozen=True)
class Option:
    """One way of having a part computed elsewhere. `rest`: seconds that are left to do here."""

    client: Client
    runs: Seqs[bytes]
    images: Seqs[PlacedImage]
    leaves: tuple[bytes, ...]
    num_bytes: int
    away: float
    rest: float


class Staging:
    def __init__(
        self, stages: Stages, lifter: Lifter, scheduler: Scheduler, costs: Costs, metrics: Metrics
    ) -> None:
        self.stages, self._lifter, self._scheduler = stages, lifter, scheduler
        self._costs, self._metrics = costs, metrics
        self._held: dict[str, int] = {}  # bytes, by request

    def ask(self, seq: Seq) -> tuple[Fetch, float] | None:
        """Objects on their way, and how long to wait for them; None: all is done here."""
        local = self._is_special(seq) or not self.may_pay()
        option = None if local else self._choose(seq)
        self._metrics.stage_chosen("local" if option is None else option.client.kind)
        if option is None:
            return None
        names = [image_name(self._lifter.seed, placed.key) for placed in option.images]
        order = Order(
            segments=seq.request.segments,
            salt=seq.request.tenant.salt,
            names=(*option.runs, *names),
            runs=frozenset(option.runs),
            images=frozenset(placed.key for placed in option.images),
            leaves=option.leaves,
            expected=option.away,
        )
        self._held[seq.id] = option.num_bytes
        patience = min(max(PATIENCE * option.away, LEAST_PATIENCE_S), MOST_PATIENCE_S)
        return option.client.order(order), patience

    def _is_special(self, seq: Seq) -> bool:
        """Whether a worker would lay it out otherwise, or nobody waits for it."""
        request = seq.request
        changed = seq.segments is not request.segments or bool(seq.gaps or seq.coarse)
        return changed or request.prefill_only or request.streaming is not None

    def _choose(self, seq: Seq) -> Option | None:
        known = self._lifter.known(seq)
        images = self._lifter.unheld(seq, known)
        seconds = self._costs.compute_s(seq.num_tokens - known, _visual(images))
        if seconds is None:
            return None
        here = Here(seconds, self._queue(), len(self._scheduler.running))
        options = [*self._prefills(seq, known), *self._encodings(seq, known, images)]
        self._held = {n: size for n, size in self._held.items() if self._lifter.holds(n)}
        room = MOST_HELD - sum(self._held.values())
        paying = [o for o in options if o.num_bytes <= room and self.pays(here, o)]
        return min(paying, key=lambda o: choice.cost_away(here, o.away, o.rest), default=None)

    def may_pay(self) -> bool:
        """Before anything is looked up: whether anybody is delayed by what is computed here."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    def pays(self, here: Here, option: Option) -> bool:
        # What shares the server's cores, or its GPU, spares nobody anything.
        return not option.client.shares and choice.pays(here, option.away, option.rest)

    def _queue(self) -> float:
        """Seconds of prompts that are to be computed before a new one's."""
        text = visual = 0
        for seq in (*self._scheduler.running, *self._scheduler.waiting):
            left = seq.num_tokens - seq.num_computed_tokens
            text += left if left > 1 else 0
            visual += 0 if seq.images_ready else seq.num_image_tokens
        return self._costs.compute_s(text, visual) or 0.0

    def _prefills(self, seq: Seq, known: int) -> list[Option]:
        """By worker: all whole runs of the prompt, and the images that its end still needs."""
        lifter, made = self._lifter, []
        names = lifter.names(seq)
        runs = names[known // lifter.run_tokens :]
        end = len(names) * lifter.run_tokens
        rest = self._costs.compute_s(seq.num_tokens - end, 0)
        if not runs or rest is None:
            return []
        images = lifter.unheld(seq, end)
        every = [image_name(lifter.seed, placed.key) for placed in seq.images]
        num_bytes = len(runs) * lifter.run_bytes + sum(map(lifter.image_bytes, images))
        for client in self.stages.of("prefill"):
            text = client.unknown(names) * lifter.run_tokens + seq.num_tokens - end
            parts = zip(seq.images, every, strict=True)
            new = [placed for placed, name in parts if client.unknown([name])]
            away = client.estimate(text, _visual(new), num_bytes)
            if away is not None:
                leaves = (*names, *every)
                made.append(Option(client, runs, images, leaves, num_bytes, away, rest))
        return made

    def _encodings(self, seq: Seq, known: int, images: Seqs[PlacedImage]) -> list[Option]:
        """By worker: the images whose KV is made without their context."""
        alone = [placed for placed in images if not placed.in_context]
        left = [placed for placed in images if placed.in_context]
        rest = self._costs.compute_s(seq.num_tokens - known, _visual(left))
        if not alone or rest is None:
            return []
        names = tuple(image_name(self._lifter.seed, placed.key) for placed in alone)
        num_bytes, made = sum(map(self._lifter.image_bytes, alone)), []
        for client in self.stages.of("encode"):
            parts = zip(alone, names, strict=True)
            new = [placed for placed, name in parts if client.unknown([name])]
            away = client.estimate(0, _visual(new), num_bytes)
            if away is not None:
                made.append(Option(client, (), alone, names, num_bytes, away, rest))
        return made

    def close(self) -> None:
        self.stages.close()


def refuse(kinds: Iterable[Kind], scheduler: Scheduler) -> None:
    """Raises ValueError for a model of which workers of these kinds could make nothing."""
    if "prefill" in kinds and scheduler.radix is None:
        raise ValueError("--stages prefill needs prefix caching")
    if "encode" in kinds and scheduler.in_context and scheduler.head is None:
        raise ValueError(
            "--stages encode: images of this model see the text before them, so their KV is made "
            "where that is; --stages prefill does both"
        )


def _visual(images: Seqs[PlacedImage]) -> int:
    return sum({placed.key: placed.num_stored for placed in images}.values())

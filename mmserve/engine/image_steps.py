"""Images in steps: which are looked at when, what waits for them, and who pays for a failure.

Owns where images were computed last, and the order of looking. Knows nothing of tokens, drafts or
what ends a request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from mmserve.engine.border import Pipeline
from mmserve.engine.cold_kv import ColdKV
from mmserve.engine.image_kv import ImageKV
from mmserve.engine.live import Live
from mmserve.engine.model_runner import ModelRunner
from mmserve.held_image import ABSENT
from mmserve.metrics import Metrics
from mmserve.request import FinishReason, ImageInput
from mmserve.scheduler.batch import Batch, ContextImage, ImageJob
from mmserve.scheduler.holdings import Holdings

logger = logging.getLogger(__name__)

# Images ride along in steps of so many rows at most: up to there a step reads weights for most of
# its time, beyond it computes, and the two would only take turns.
MOST_RIDDEN_ROWS = 256
LONGEST_START_S = 0.005  # of the host, in a step that images ride along; at least one is started
MAX_KEYS = 4096  # images of which is known where they were computed last


class ImageSteps:
    """`lives`: the requests in the engine, which `finish` ends."""

    def __init__(
        self,
        runner: ModelRunner,
        holdings: Holdings,
        pipeline: Pipeline,
        metrics: Metrics,
        lives: Mapping[str, Live],
        finish: Callable[[Live, FinishReason, str], None],
        tier: Callable[[bytes], str | None],
        cold: ColdKV | None = None,
    ) -> None:
        """`tier`: where the KV of what lies under a key is, that is not in the pools; `cold`: in
        fewer bits; None: nowhere."""
        self._runner, self._holdings, self._pipeline = runner, holdings, pipeline
        self._metrics, self._lives, self._finish = metrics, lives, finish
        self._last_keys: dict[bytes, bytes] = {}  # by digest, of images computed in their context
        pools = [runner.vision[g] for g in holdings.image_groups]
        self.kv = ImageKV(pools, lambda digest: self._last_keys.get(digest, digest), tier, cold)
        pipeline.connect(self.is_resident, metrics.image_decodes.inc)

    def ahead(self, batch: Batch) -> Batch:
        """What of a step to launch now: all of it, or what need not wait for images that are still
        being looked at.

        Those images ride along: a step of few rows reads weights and leaves the arithmetic to
        them. What is held is scheduled again by each step until they have been seen. So everybody
        gets on: a step is never empty, nothing is held for a step without others in it, and an
        image that has been started is seen in time whatever is launched meanwhile.
        """
        runner = self._runner
        if runner.team.ranks > 1:
            self._share_out(batch)
        if not runner.sees_beside or not (batch.images or any(c.images for c in batch.chunks)):
            return batch
        now = batch.without(lambda image: not runner.has_seen(image.digest))
        if not now.chunks or now.num_tokens > MOST_RIDDEN_ROWS:
            return batch
        wanted = [(job.key, job.image) for job in batch.images]
        wanted += [(c.placed.key, c.placed.image) for chunk in now.held for c in chunk.images]
        for _, image in wanted:
            runner.touch(image.digest)
        started = time.monotonic()
        new = (each for each in wanted if not runner.knows(each[1].digest))
        for number, (key, image) in enumerate(new):
            if number and time.monotonic() - started > LONGEST_START_S:
                break
            self.see(key, image)
        return now

    def _share_out(self, batch: Batch) -> None:
        """Have the step's new images looked at by all ranks at once; the first takes its own last,
        since it may have to wait for them. A lone image costs no way to another."""
        ranks = self._runner.team.ranks
        wanted = [(job.key, job.image) for job in batch.images]
        contexts = (c.placed for chunk in batch.chunks for c in chunk.images)
        wanted += [(placed.key, placed.image) for placed in contexts]
        new = {i.digest: (k, i) for k, i in wanted if not self._runner.knows(i.digest)}
        placed = [(number % ranks, *each) for number, each in enumerate(new.values())]
        for rank, key, image in sorted(placed, key=lambda each: each[0] == 0):
            self.see(key, image, rank)

    def see(self, key: bytes, image: ImageInput, rank: int = 0) -> bool:
        """Have an image looked at, if it is new; a failure ends the requests that need it and no
        others. `rank`: who looks."""
        if self._runner.knows(image.digest):
            self._runner.touch(image.digest)
            return True
        if not self._holdings.is_reserved(key):
            return False  # its last holder has just ended, with another image that failed
        whole = image.whole
        seen = self._try_image(
            key, lambda: self._runner.see(whole, self._pipeline.pixels(whole), rank)
        )
        self._metrics.vision_encoder_runs.inc(seen)
        return seen

    def encode(self, job: ImageJob) -> None:
        """Write one image's KV; failures as above."""
        holdings = self._holdings
        if not self.see(job.key, job.image) or not holdings.is_reserved(job.key):
            return
        if self._try_image(job.key, lambda: self._runner.encode(job)):
            holdings.settle(job.key, written=True)
            self._metrics.vision_kv_writes.inc(job.image.part_of is None)

    def is_resident(self, digest: bytes) -> bool:
        """Whether an image's pixels are not needed; where it is computed in its context, if that is
        the one that it was last computed in: for another, a step makes them. Any thread may ask."""
        key = self._last_keys.get(digest, digest)
        return self.kv.state(key) != ABSENT or self._runner.knows(digest)

    def note_context(self, context: ContextImage) -> None:
        """An image is computed in its context, under this key."""
        placed = context.placed
        self._last_keys.pop(placed.image.digest, None)
        self._last_keys[placed.image.digest] = placed.key
        if len(self._last_keys) > MAX_KEYS:
            del self._last_keys[next(iter(self._last_keys))]

    def _try_image(self, key: bytes, work: Callable[[], None]) -> bool:
        """Work on an image, charged to whoever waits for it."""
        started = time.monotonic()
        holdings = self._holdings
        lives = self._lives.values()
        holders = [i for i in lives if any(holdings.awaits(seq, key) for seq in i.seqs)]
        try:
            work()
        except Exception:
            logger.exception("encoding an image failed")
            holdings.settle(key, written=False)
            for live in holders:
                self._finish(live, FinishReason.ERROR, "The image could not be encoded.")
            return False
        for live in holders:
            live.clock.schedule(started)
            live.clock.image_s += time.monotonic() - started
        return True

"""Images that are computed in a sequence: with how much of its text they go into a step.

Owns what is never split. Knows nothing of queues, or of who gives way.
"""

from __future__ import annotations

from mmserve.placed import PlacedImage
from mmserve.scheduler.batch import Batch, ContextImage
from mmserve.scheduler.holdings import Holdings
from mmserve.sequence import Sequence

Placed = tuple[int, list[ContextImage]]  # where this step's text ends, and the images before that


def in_context(
    holdings: Holdings,
    batch: Batch,
    seq: Sequence,
    lacking: list[PlacedImage],
    end: int,
    budget: int,
) -> Placed:
    """The images to compute, with the text between them; where this step's text ends, `end` at
    most: before an image that is still to be encoded, or that another sequence computes."""
    at, room = seq.num_computed_tokens, budget
    images: list[ContextImage] = []
    computed = batch.computed
    for placed in lacking:
        # One behind all text is computed with the token that is the first to look at it; by a
        # prefill, which has none, at once.
        if placed.text_index == seq.num_tokens and not seq.request.prefill_only:
            break
        gap = max(placed.text_index - at, 0)
        if at + gap > end or gap > room:
            break
        at, room = at + gap, room - gap
        waits = not placed.in_context or placed.key in computed
        if waits or any(other.skip and other.start == placed.end for other in lacking):
            return at, images  # a head that sees its whole image waits for the tail, too
        first = at == seq.num_computed_tokens and not images and batch.only_decodes
        if placed.image.num_tokens > room and not first:
            return at, images
        images.append(ContextImage(placed, holdings.writes(placed)))
        room -= placed.image.num_tokens
    return max(min(end, at + room), at), images


def whole_prompt(
    holdings: Holdings, batch: Batch, seq: Sequence, lacking: list[PlacedImage], budget: int
) -> Placed:
    """All that is missing of a prompt whose rows all see each other, or nothing yet."""
    start, end = seq.num_computed_tokens, seq.num_prompt_tokens
    rows = end - start + sum(placed.image.num_tokens for placed in lacking)
    fits = rows <= budget or batch.only_decodes
    if not fits or not batch.computed.isdisjoint(placed.key for placed in lacking):
        return start, []
    return end, [ContextImage(placed, holdings.writes(placed)) for placed in lacking]

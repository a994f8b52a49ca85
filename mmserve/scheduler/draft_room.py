"""How far ahead a draft may reach, so that checking it is what plain steps would have done.

Knows nothing of who drafts, or whether it pays.
"""

from __future__ import annotations

from mmserve.scheduler.holdings import Holdings
from mmserve.sequence import Sequence, SequenceStatus
from mmserve.spec.draft import MOST_TOKENS


def draft_room(seq: Sequence, holdings: Holdings) -> int:
    """Tokens behind a sequence's last that its next step may check; 0 where that step has more to
    compute than the last token, or where the token behind it ends the answer in any case."""
    request = seq.request
    if request.prefill_only or request.params.beams is not None:
        return 0
    if seq.status is not SequenceStatus.RUNNING or seq.num_pending:
        return 0
    if seq.num_tokens - seq.num_computed_tokens != 1 or not seq.images_ready:
        return 0
    room = min(seq.token_limit - seq.num_tokens - 1, MOST_TOKENS)
    if seq.window is not None:  # a cut comes no later than it would have
        room = min(room, seq.window - seq.num_tokens)
    room = holdings.longest_step(seq.num_computed_tokens, room + 1) - 1
    # All its rows are rotated alike, as they would have been.
    return max(seq.course.room(seq.position(seq.num_tokens), room), 0)

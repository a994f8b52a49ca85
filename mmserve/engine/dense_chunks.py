"""Long chunks that read nothing but themselves, for a library's attention.

Owns which they are and where their keys stand. Knows nothing of steps or launches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mmserve.engine.transfer import send
from mmserve.kernels import work
from mmserve.kernels.reference import NOWHERE, vision_slot
from mmserve.model.cuda_step import DENSE_MULTIPLE, DenseChunk

# Of a chunk, from which on the library's attention is worth its launches: it takes the host ten a
# layer, through which shorter chunks had the device wait.
DENSE_ROWS = 1024


def reads_itself(reader: work.Reader, slots: Any) -> bool:
    """Whether causal attention over the chunk alone is all it takes. `slots` [T]: of the step."""
    if reader.num_queries < DENSE_ROWS:
        return False
    lo, hi, visual_lo, visual_hi = reader.matrix
    visual = np.maximum(visual_hi - visual_lo, 0)
    # Each row sees one token more than the row before it, text or image: its own.
    seen = hi + visual
    causal = seen[0] == 1 and bool((np.diff(seen) == 1).all())
    whole = not lo.any() and not visual_lo[visual > 0].any() and not reader.sink_tokens
    stored = bool((slots[reader.first_row :][: reader.num_queries] != NOWHERE).all())
    return causal and whole and stored


def dense_chunk(reader: work.Reader, slots: Any, device: torch.device) -> DenseChunk:
    first, count = reader.first_row, reader.num_queries
    mine = slots[first : first + count].astype(np.int64)
    padded = np.zeros(-(-count // DENSE_MULTIPLE) * DENSE_MULTIPLE, np.int64)
    padded[:count] = np.maximum(mine, 0)
    own = np.flatnonzero(mine < NOWHERE)
    parts = (padded, own, vision_slot(mine[own])) if len(own) else (padded,)
    text, *images = (send(torch.from_numpy(part), device) for part in parts)
    return DenseChunk(first, count, text, (images[0], images[1]) if images else None)

"""Grammars' bits on logits.

Owns the bit layout and the copy to the device. Knows nothing of what is allowed, or why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mmserve.engine.grammar import Matcher, fill_masks
from mmserve.engine.transfer import send, upload


def mask(logits: Tensor, matchers: Sequence[Matcher | None]) -> Tensor:
    """Logits [B, V] with -inf for what a row's matcher does not allow; as they are where no row
    has one. A vocabulary that is padded beyond the tokenizer's is never allowed there."""
    rows = {i: matcher for i, matcher in enumerate(matchers) if matcher is not None}
    if not rows:
        return logits
    known = [*rows.values()]
    bits = torch.zeros(len(rows), known[0].mask_words, dtype=torch.int32)
    fill_masks(known, bits.data_ptr(), 4 * known[0].mask_words)
    allowed = unpack(send(bits, logits.device), logits.shape[1])
    if len(rows) == len(logits):
        return logits.masked_fill(~allowed, -math.inf)
    index = upload(list(rows), torch.long, logits.device)
    masked = logits[index].masked_fill(~allowed, -math.inf)
    return logits.index_copy(0, index, masked)


def unpack(bits: Tensor, width: int) -> Tensor:
    """[R, W] int32, bit i of a row at i % 32 of word i // 32 -> [R, width] bool."""
    allowed = spread(bits) if bits.is_cuda else _spread_here(bits)
    missing = width - allowed.shape[1]
    if missing > 0:
        return torch.nn.functional.pad(allowed, (0, missing))
    return allowed[:, :width]


def spread(bits: Tensor) -> Tensor:
    """[R, W] int32 -> [R, 32 * W] bool, on any device."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits.unsqueeze(-1) >> shifts) & 1).flatten(1).bool()


def _spread_here(bits: Tensor) -> Tensor:
    """The same on the host: a tenth of the time, and no other threads to wait for."""
    host = np.unpackbits(bits.numpy().view(np.uint8), axis=1, bitorder="little")
    return torch.from_numpy(host).view(torch.bool)

"""What lies between a layer's first product and its attention's output on a GPU.

Owns the turning of heads, the write of keys and values, and the reading. Knows nothing of weights
but the heads' own norms, and nothing of sequences or where keys are held.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmserve.kernels import fused
from mmserve.model.cuda_step import CUDAStep

WIDEST = 96  # dimensions of a head up to which one launch for a single row is quicker than three


class CUDAHeads:
    """All heads of one layer."""

    def __init__(
        self, attend: Any, norm: fused.HeadNorm | None = None, softcap: float | None = None
    ) -> None:
        """`attend`: transformers' module; `norm`: of every head; `softcap`: of the scores."""
        self.index: int = attend.layer_idx
        self.head_dim: int = attend.head_dim
        self.scaling: float = attend.scaling
        self.norm, self.softcap = norm, softcap

    def read(
        self,
        qkv: Tensor,
        step: CUDAStep,
        position_embeddings: tuple[Tensor, Tensor] | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """qkv [T, (H + 2 Hkv) D], rows contiguous -> what the heads have read [T, H D], in `out`
        where there is one.

        `position_embeddings`: cos and sin [1, T, R] by the model's own rotary module, for steps
        without `turns`; the first R of a head's dimensions are turned.
        """
        turns, rotary = step.turns, None
        if turns is None:
            assert position_embeddings is not None
            cos, sin = (part[0] for part in position_embeddings)
            turns, rotary = fused.Turns(cos, sin), cos.shape[1]
        text, vision = step.pools(self.index)
        num_heads = qkv.shape[1] // self.head_dim - 2 * text.k.shape[0]
        q = qkv.new_empty(len(qkv), num_heads, self.head_dim)
        # By heads alone what several share is read by each: of a long context only where two do.
        shared = num_heads > 2 * text.k.shape[0] and not step.launch.few
        suits = self.head_dim <= WIDEST and not shared and text.kind.plain and vision.kind.plain
        if step.lone and suits:
            read = q if out is None else out.view(q.shape)
            how: dict[str, Any] = {"norm": self.norm, "rotary": rotary, "softcap": self.softcap}
            step.read_row(self.index, qkv, turns, self.scaling, read, **how)
            return read.flatten(1)
        slots = step.slots[step.places[self.index][0]]
        fused.rotate_store(qkv, turns, slots, q, *step.written(self.index), self.norm, rotary)
        step.fill(self.index)
        read = step.read(self.index, q, self.scaling, self.softcap).flatten(1)
        return read if out is None else out.copy_(read)

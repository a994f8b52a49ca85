"""Our attention inside transformers' models.

Owns the registration under the name "mmserve" and `Step`, what one model call reads and writes.
Knows nothing of sequences or scheduling. The step travels as the keyword argument `step` of the
model call, which transformers hands on to every layer and to the attention function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from mmserve.cache.kv_pool import KVPool
from mmserve.kernels import reference

NAME = "mmserve"


@dataclass(frozen=True)
class Step:
    """One model call's attention: `own` is written at the plan's slots and read with `vision`."""

    plan: reference.AttentionPlan
    own: KVPool
    vision: KVPool

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q [T, H, D], k and v [T, Hkv, D], rotated -> [T, H, D]; stores k and v."""
        own = self.own.layer(layer)
        for pool, new in zip(own, (k, v), strict=True):
            reference.write_kv(pool, self.plan.slots, new)
        return reference.paged_attention(q, self.plan, own, self.vision.layer(layer), scale)


def mmserve_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float,
    *,
    step: Step,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, H, T, D], key and value [1, Hkv, T, D]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    layer: Any = module.layer_idx
    return step.attend(layer, q, k, v, scaling)[None], None


def no_mask(*_: Any, **__: Any) -> None:
    """The plan says who reads what; a mask tensor would only cost time."""


def register() -> None:
    AttentionInterface.register(NAME, mmserve_attention)
    AttentionMaskInterface.register(NAME, no_mask)

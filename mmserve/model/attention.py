"""Our attention inside transformers' models.

Owns the registration under the name "mmserve" and the two kinds of step a model call can be: text
over both pools, or images alone. Knows nothing of sequences or scheduling. The step travels as the
keyword argument `step` of the model call, which transformers hands on to the attention function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from mmserve.cache.kv_pool import TextKVPool, VisionKVPool
from mmserve.kernels import reference

NAME = "mmserve"


class Step(Protocol):
    """One model call's attention."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q [T, H, D], k and v [T, Hkv, D], rotated -> [T, H, D]; stores k and v."""
        ...


@dataclass(frozen=True)
class TextStep:
    """Text tokens of many sequences, reading text pages and the images before them."""

    plan: reference.AttentionPlan
    text: TextKVPool
    vision: VisionKVPool

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        text = self.text.layer(layer)
        for pool, new in zip(text, (k, v), strict=True):
            reference.write_kv(pool, self.plan.slots, new)
        return reference.paged_attention(q, self.plan, text, self.vision.layer(layer), scale)


@dataclass(frozen=True)
class ImageStep:
    """One image alone at local positions, written to its pages of the vision pool."""

    pages: list[int]
    vision: VisionKVPool

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.vision.write(self.pages, layer, k, v)
        return reference.image_attention(q[None], k[None], v[None], scale)[0]


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

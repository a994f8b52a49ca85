"""Our attention inside transformers' models.

Owns the registration under the name "mmserve" and `Step`, what one model call reads and writes.
Knows nothing of sequences or scheduling. The step travels as the keyword argument `step` of the
model call, which transformers hands on to every layer and to the attention function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from mmserve.cache.kv_pool import KVPool
from mmserve.cache.layer_group import LayerGroup
from mmserve.kernels import reference

NAME = "mmserve"

Place = tuple[int, int]  # a layer's group, and its number there


class GroupStep(NamedTuple):
    """What the layers of one group read and write."""

    plan: reference.AttentionPlan
    text: KVPool
    vision: KVPool


def places(groups: Sequence[LayerGroup]) -> dict[int, Place]:
    """Where each layer's keys and values are held."""
    return {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)}


@dataclass(frozen=True)
class Step:
    """One model call's attention, by layer group."""

    groups: tuple[GroupStep, ...]
    places: dict[int, Place]

    def of(self, layer: int) -> tuple[GroupStep, int]:
        """A layer's group, and its number in the group's pools."""
        group, index = self.places[layer]
        return self.groups[group], index

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, H, D], k and v [T, Hkv, D], rotated -> [T, H, D]; stores k and v."""
        (plan, text, vision), index = self.of(layer)
        pools = text.layer(index), vision.layer(index)
        reference.write_step(plan, *pools, k, v)
        return reference.paged_attention(q, plan, *pools, scale, softcap=softcap, sinks=sinks)


def mmserve_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    *,
    step: Step,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, H, T, D], key and value [1, Hkv, T, D]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    layer: Any = module.layer_idx
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    return step.attend(layer, q, k, v, scale, softcap, s_aux)[None], None


def no_mask(*_: Any, **__: Any) -> None:
    """The plan says who reads what; a mask tensor would only cost time."""


def register() -> None:
    AttentionInterface.register(NAME, mmserve_attention)
    AttentionMaskInterface.register(NAME, no_mask)

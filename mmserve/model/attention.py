"""Our attention inside transformers' models.

Owns the registration under the name "mmserve", `Step`, what one model call reads and writes, and
`Probe`, which only listens. Knows nothing of sequences or scheduling. The step travels as the
keyword argument `step` of the model call, which transformers hands on to every layer and to the
attention function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from mmserve.cache.kv_pool import KVPool
from mmserve.cache.layer_group import LayerGroup
from mmserve.kernels import reference

NAME = "mmserve"
WINDOW = "mmserve_window"  # of an attention module whose class knows no windows: tokens it reads

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

    def look(self, layer: int, q: Tensor, kv_heads: int, scale: float) -> Tensor:
        """q [T, H, D] over images that are stored already -> [T, H, D]."""
        (plan, text, vision), index = self.of(layer)
        pools = text.layer(index), vision.layer(index)
        return reference.paged_attention(q, plan, *pools, scale)


class Layer(NamedTuple):
    """How a layer's attention is called. `window`: keys that a query reads; None: all. `softcap`:
    of its scores."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    cross: bool = False
    softcap: float | None = None


class Probe:
    """In a `Step`'s place: hears how every layer calls, and answers zeros."""

    def __init__(self) -> None:
        self.layers: dict[int, Layer] = {}

    def note(
        self, layer: int, q: Tensor, k: Tensor, window: int | None, softcap: float | None
    ) -> Tensor:
        """q [T, H, D], k [T, Hkv, D]."""
        self.layers[layer] = Layer(q.shape[1], k.shape[1], q.shape[2], window, softcap=softcap)
        return torch.zeros_like(q)

    def look(self, layer: int, q: Tensor, kv_heads: int, scale: float) -> Tensor:
        self.layers[layer] = Layer(q.shape[1], kv_heads, q.shape[2], cross=True)
        return torch.zeros_like(q)


def mmserve_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    *,
    step: Step | Probe,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, H, T, D], key and value [1, Hkv, T, D]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    layer: Any = module.layer_idx
    if isinstance(step, Probe):
        window: Any = getattr(module, WINDOW, sliding_window)
        return step.note(layer, q, k, window, softcap)[None], None
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    return step.attend(layer, q, k, v, scale, softcap, s_aux)[None], None


def register() -> None:
    """No mask function goes with it: the plan says who reads what, and transformers, which finds
    none under the name, makes no mask (5.17 to 5.24)."""
    AttentionInterface.register(NAME, mmserve_attention)

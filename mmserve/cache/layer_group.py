"""Which of a model's layers read the same keys, and so share page tables and pools.

Owns `LayerGroup` only. No torch; knows nothing of pages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LayerGroup:
    """Layers by index. `window`: how many tokens a query reads, itself included; None: all.

    `text`, `images`: whether they read the sequence's own text, and its images. Layers that only
    look at images (cross attention) have no text; where there are such, the others have no images.
    `residual`: a page of text is stored when it is full; until then its tokens stand in a pool of
    their own, as the model computes them.
    """

    layers: tuple[int, ...]
    window: int | None = None
    text: bool = True
    images: bool = True
    residual: bool = False


def set_apart(groups: Sequence[LayerGroup], layers: Collection[int]) -> tuple[LayerGroup, ...]:
    """The same layers, but those of `layers` in groups of their own.

    Raises ValueError where there is no such layer.
    """
    known = sorted(layer for group in groups for layer in group.layers)
    if missing := sorted(set(layers) - set(known)):
        raise ValueError(f"there is no layer {missing[0]}: the model has {known[0]} to {known[-1]}")

    def split(group: LayerGroup) -> Iterator[LayerGroup]:
        for apart in (False, True):
            own = tuple(layer for layer in group.layers if (layer in layers) is apart)
            if own:
                yield replace(group, layers=own)

    return tuple(part for group in groups for part in split(group))

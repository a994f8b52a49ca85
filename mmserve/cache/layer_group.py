"""Which of a model's layers read the same keys, and so share page tables and pools.

Owns `LayerGroup` only. No torch; knows nothing of pages.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerGroup:
    """Layers by index. `window`: how many tokens a query reads, itself included; None: all.

    `text`, `images`: whether they read the sequence's own text, and its images. Layers that only
    look at images (cross attention) have no text; where there are such, the others have no images.
    """

    layers: tuple[int, ...]
    window: int | None = None
    text: bool = True
    images: bool = True

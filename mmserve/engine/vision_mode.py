"""How much of what stands before an image its keys and values have seen.

Owns the three modes and which of them a model can be served in. Knows nothing of pages or steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmserve.model.adapter import Adapter


@dataclass(frozen=True)
class VisionMode:
    """`isolated`: nothing, so one copy serves everyone. `prefix`: everything. `blend`: the first
    `head` tokens of an image everything, the rest nothing: an approximation for models that were
    made for `prefix`."""

    name: str
    head: int | None = None

    @property
    def in_context(self) -> bool:
        return self.name != "isolated"

    @property
    def turns_queries(self) -> bool:
        """Whether keys are stored as if their image stood first."""
        return self.name != "prefix"


def vision_mode(
    name: str, adapter: Adapter, *, stock: bool, head: int, page_size: int
) -> VisionMode:
    """The mode that is asked for; "auto": the one the model was made for. Raises ValueError."""
    own = "prefix" if stock and adapter.cross is None else "isolated"
    declared = getattr(adapter.model.config, "mmserve_vision_mode", own)
    name = declared if name == "auto" else name
    if name not in ("isolated", "prefix", "blend"):
        raise ValueError(f"vision mode {name!r} is none of auto, isolated, prefix, blend")
    if adapter.cross is not None and name != "isolated":
        raise ValueError(f"images of this model never see text, so {name} is not possible")
    if stock and adapter.cross is None:
        _check_stock(name, adapter, declared)
    if name != "blend":
        return VisionMode(name)
    if head < page_size or head % page_size:
        raise ValueError(
            f"in blend mode {head} tokens of each image cannot be computed anew; it takes a "
            f"multiple of {page_size}, a page"
        )
    return VisionMode(name, head)


def _check_stock(name: str, adapter: Adapter, declared: str) -> None:
    kind = adapter.model.config.model_type
    if name == "isolated" and declared != "isolated":
        raise ValueError(
            f"{kind} was trained with images that see the text before them; isolated is for models "
            'that declare it ("mmserve_vision_mode": "isolated" in config.json). Ask for prefix, '
            "or for blend, which is approximate"
        )
    if name == "prefix":
        return
    if adapter.sight.whole_prompt:
        raise ValueError(f"the whole prompt of {kind} sees itself, so {name} is not possible")
    if adapter.turning_frequencies() is None:
        raise ValueError(f"{name} needs one rotary embedding for all layers, which {kind} has not")

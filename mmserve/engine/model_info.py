"""What a server tells its clients about the model. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mmserve.config import ImageLimits
from mmserve.engine.border import GREEDY
from mmserve.request import SamplingParams
from mmserve.tools import HERMES, ToolFormat


@dataclass(frozen=True)
class ModelInfo:
    name: str
    max_model_len: int
    image_tokens: int
    image_limits: ImageLimits
    created: int
    default_sampling: SamplingParams = GREEDY
    tool_format: ToolFormat | None = HERMES  # None: it cannot be told of tools
    vision_mode: str = "isolated"
    blend_tokens: int | None = None  # in blend mode
    # Of an image that is seen whole, by the detail asked for; empty where that makes no difference.
    image_details: Mapping[str, int] = field(default_factory=dict)
    image_crops: Mapping[str, int] | None = None  # how large images are cut up, if they are

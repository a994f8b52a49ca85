"""What a server tells its clients about the model. Values only."""

from __future__ import annotations

from dataclasses import dataclass

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

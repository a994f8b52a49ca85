"""Normalised pixels to feature maps: an open_clip vision tower, read at several depths.

Owns building the tower from its JSON and folding batch norm. Knows nothing of files, latents or
language models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from open_clip.model import _build_vision_tower  # open_clip builds a tower alone only here
from torch import Tensor, nn

BEHIND_FEATURES = ("conv_head", "bn2", "norm_head", "act2", "classifier")  # of convolutional trunks


@dataclass(frozen=True)
class EncoderConfig:
    """`vision_cfg` is open_clip's; `features` are the blocks (ViT) or stages (timm) to read."""

    vision_cfg: dict[str, Any]
    features: tuple[int, ...]
    fold_batch_norm: bool = False


class VisionEncoder(nn.Module):
    """One image tower without pooling or head: open_clip's own ViT or a timm trunk."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        # A tower's output projection is not read; the least width keeps it cheap.
        tower = cast(nn.Module, _build_vision_tower(1, dict(config.vision_cfg)))
        self.trunk = cast(Any, tower.trunk if hasattr(tower, "trunk") else tower)
        self._features = list(config.features)
        self.trunk.prune_intermediate_layers(self._features)
        # Releases of timm differ in what they leave behind the last feature; nothing of it is read.
        for name in BEHIND_FEATURES:
            if hasattr(self.trunk, name):
                setattr(self.trunk, name, nn.Identity())
        if config.fold_batch_norm:
            fold_batch_norm(self.trunk)

    def forward(self, pixels: Tensor) -> list[Tensor]:
        """pixels: float32 [N, 3, H, W], normalised -> features, each [N, C, h, w]."""
        out = self.trunk.forward_intermediates(
            pixels,
            indices=self._features,
            stop_early=True,
            intermediates_only=True,
            output_fmt="NCHW",
        )
        # open_clip's towers answer with a dictionary, timm's with the list.
        return cast(list[Tensor], out["image_intermediates"] if isinstance(out, dict) else out)


@torch.no_grad()
def fold_batch_norm(module: nn.Module) -> None:
    """Moves each batch norm into the convolution before it, in place; its activation stays.

    Afterwards every such convolution has a bias and the batch norm's name holds the activation.
    """
    for parent in list(module.modules()):
        conv: nn.Conv2d | None = None
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Conv2d):
                conv = child
            elif isinstance(child, nn.BatchNorm2d):
                assert conv is not None and conv.out_channels == child.num_features
                mean, var, bias = child.running_mean, child.running_var, conv.bias
                assert mean is not None and var is not None
                gain = child.weight / (var + child.eps).sqrt()
                conv.weight.mul_(gain[:, None, None, None])
                shift = mean if bias is None else mean - bias
                conv.bias = nn.Parameter(child.bias - shift * gain)
                setattr(parent, name, getattr(child, "act", nn.Identity()))
                conv = None

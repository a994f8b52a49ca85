"""Public models' vision towers with random weights, behind the interface of our vision path.

Owns the towers and the two ways features become visual tokens: our compressor, or one
token a patch through a small network. Knows nothing of language models beyond their width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel, SiglipVisionConfig, SiglipVisionModel

from mmserve.bench.dims import TowerDims
from mmserve.vision.encoder import EncoderConfig
from mmserve.vision.model import VisionConfig, VisionModel
from mmserve.vision.perceiver import CompressorConfig, PerceiverCompressor, Source

COMPRESSOR_LAYERS = 3
DEVIATION = 0.02


class ShapedVision(VisionModel):
    """`VisionModel` with a tower from transformers; same pixels in, tokens in the tower's dtype.

    The compressor computes in the tower's dtype, its fixed bias included.
    """

    def __init__(self, dims: TowerDims, hidden_size: int, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.config = _config(dims, hidden_size)
        parts: Any = self
        parts.visual = _Tower(dims)
        parts.resampler = (
            PerceiverCompressor(self.config.compressor)
            if dims.latent_grid
            else _PatchProjection(dims.hidden, hidden_size)
        )
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=DEVIATION)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:  # norms
                nn.init.ones_(parameter)
        self.to(dtype)
        self.register_buffer("scale", torch.full((1, 3, 1, 1), 127.5), persistent=False)
        self.register_buffer("shift", torch.ones(1, 3, 1, 1), persistent=False)


class _Tower(nn.Module):
    """pixels [N, 3, H, W], any float dtype -> one feature map [N, hidden, side, side]."""

    def __init__(self, dims: TowerDims) -> None:
        super().__init__()
        self._side = dims.side
        shape: dict[str, Any] = {
            "hidden_size": dims.hidden,
            "intermediate_size": dims.mlp,
            "num_hidden_layers": dims.layers,
            "num_attention_heads": dims.heads,
            "image_size": dims.image_size,
            "patch_size": dims.patch,
        }
        self.trunk: Any = (
            SiglipVisionModel(SiglipVisionConfig(vision_use_head=False, **shape))
            if dims.family == "siglip"
            else CLIPVisionModel(CLIPVisionConfig(**shape))
        )

    def forward(self, pixels: Tensor) -> list[Tensor]:
        dtype = next(self.parameters()).dtype
        patches: Tensor = self.trunk(pixel_values=pixels.to(dtype)).last_hidden_state
        patches = patches[:, -(self._side**2) :]  # without CLIP's class token
        return [patches.transpose(1, 2).reshape(len(patches), -1, self._side, self._side)]


class _PatchProjection(nn.Module):
    """One feature map [N, C, h, w] -> [N, h w, hidden]: LLaVA's two layers."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(channels, hidden), nn.GELU(), nn.Linear(hidden, hidden)
        )

    def forward(self, features: list[Tensor]) -> Tensor:
        out: Tensor = self.layers(features[0].flatten(2).transpose(1, 2))
        return out


def _config(dims: TowerDims, hidden_size: int) -> VisionConfig:
    half = (0.5, 0.5, 0.5)
    return VisionConfig(
        encoder=EncoderConfig({}, (0,)),
        compressor=CompressorConfig(
            image_size=dims.image_size,
            levels={dims.patch: (Source(0, dims.hidden),)},
            width=dims.hidden,
            heads=dims.heads,
            layers=COMPRESSOR_LAYERS,
            latent_grid=dims.latent_grid or (dims.side, dims.side),
            local_sigmas=(),
            hidden_size=hidden_size,
        ),
        mean=half,
        std=half,
    )

"""Public models' vision towers with random weights, behind the interface of our vision path.

Owns the towers and the two ways features become visual tokens: our compressor, or one
token a patch through a small network. Knows nothing of language models beyond their width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel, SiglipVisionConfig, SiglipVisionModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)

from mmserve.bench.dims import TowerDims
from mmserve.model import span_attention
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
        if dims.family == "qwen2.5-vl":
            parts.visual, parts.resampler = _QwenTower(dims, hidden_size), nn.Identity()
        else:
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


class _QwenTower(nn.Module):
    """pixels [1, 3, H, W], any float dtype -> visual tokens [1, n, hidden_size]."""

    def __init__(self, dims: TowerDims, hidden_size: int) -> None:
        super().__init__()
        self._patch, self._half = dims.patch, dims.side // 2
        full = range(dims.layers // 4 - 1, dims.layers, max(dims.layers // 4, 1))
        config = Qwen2_5_VLVisionConfig(
            depth=dims.layers,
            hidden_size=dims.hidden,
            intermediate_size=dims.mlp,
            num_heads=dims.heads,
            patch_size=dims.patch,
            window_size=8 * dims.patch,
            out_hidden_size=hidden_size,
            fullatt_block_indexes=[n for n in full if n >= 0],
        )
        self.trunk: Any = Qwen2_5_VisionTransformerPretrainedModel._from_config(config)
        span_attention.install(self)
        # Of the one shape of all images: worked out once, or no graph could hold the tower.
        grid = torch.tensor([[1, 2 * self._half, 2 * self._half]])
        told = {"grid_thw": grid, **span_attention.layout(self.trunk, grid)}
        self._longest = {name: told.pop(name) for name in ("max_seqlen", "max_window_seqlen")}
        for name, tensor in told.items():
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Patches in the order of the model's processor: four that become a token together."""
        size, half = self._patch, self._half
        image = pixels.to(next(self.parameters()).dtype)[0, :, : 2 * half * size, : 2 * half * size]
        cut = image.view(3, half, 2, size, half, 2, size).permute(1, 4, 2, 5, 0, 3, 6)
        twice = cut.unsqueeze(5).expand(-1, -1, -1, -1, -1, 2, -1, -1)  # a still picture
        told = {**dict(self.named_buffers(recurse=False)), **self._longest}
        out: Any = self.trunk(twice.reshape(4 * half * half, -1), **told)
        tokens = getattr(out, "pooler_output", out)
        return (torch.cat(list(tokens)) if isinstance(tokens, (list, tuple)) else tokens)[None]


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

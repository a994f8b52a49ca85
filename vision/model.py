"""The whole vision path after decoding: pixels to visual tokens.

Owns the composition encoder -> compressor, normalisation and the canonical shape images are
computed in. Knows nothing of files, caches or the language model beyond its width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mmserve.vision.crops import Crops
from mmserve.vision.encoder import EncoderConfig, VisionEncoder
from mmserve.vision.perceiver import CompressorConfig, PerceiverCompressor

DETAILS = ("auto", "low", "high", "original")  # that can be asked for


@dataclass(frozen=True)
class VisionConfig:
    encoder: EncoderConfig
    compressor: CompressorConfig
    mean: tuple[float, ...]  # a channel, of pixels scaled to 0..1
    std: tuple[float, ...]
    # Of nested latents, how many an image gets by the detail that is asked for; else all.
    details: Mapping[str, int] = field(default_factory=dict)
    crops: Crops | None = None  # how large images are cut up, if they are

    def __post_init__(self) -> None:
        """Raises ValueError for a detail of other numbers than the compressor's, or fewer than a
        crop's where it asks for crops."""
        if self.crops is not None and self.details.get("high", self.num_tokens) < self.num_tokens:
            raise ValueError("crops take all latents, and detail high asks for crops")
        for detail, count in self.details.items():
            if count not in self.compressor.nested:
                raise ValueError(f"detail {detail} has {count} latents; nested are no such")

    @property
    def image_size(self) -> int:
        """Pixels a side."""
        return self.compressor.image_size

    @property
    def num_tokens(self) -> int:
        """Visual tokens of an image that is seen whole, or of one of its pieces, at most."""
        return self.compressor.num_latents

    def tokens_of(self, most: int | None = None) -> dict[str, int]:
        """Visual tokens of a whole image by the detail asked for, none above `most`.

        Raises ValueError for a limit that the latents cannot keep.
        """
        sizes = self.compressor.nested or (self.num_tokens,)
        if most is not None and most < sizes[0]:
            known = ", ".join(map(str, sizes))
            raise ValueError(f"images of this model take {known} tokens, not at most {most}")
        kept = max(size for size in sizes if most is None or size <= most)
        return {d: min(self.details.get(d, self.num_tokens), kept) for d in DETAILS}

    def crops_within(self, most: int | None = None) -> Crops | None:
        """How images are cut up that take at most so many tokens: each piece takes all latents, so
        there may be room for none."""
        if self.crops is None or most is None:
            return self.crops
        return self.crops.within(most, self.num_tokens)


class VisionModel(nn.Module):
    """Images to visual tokens in the language model's embedding space."""

    scale: Tensor
    shift: Tensor

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.visual = VisionEncoder(config.encoder)
        self.resampler = PerceiverCompressor(config.compressor)
        mean, std = (torch.tensor(x).view(1, -1, 1, 1) for x in (config.mean, config.std))
        self.register_buffer("scale", 255 * std, persistent=False)
        self.register_buffer("shift", mean / std, persistent=False)

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Exactly this model's tensors, under `visual.` and `resampler.`, in any float dtype."""
        named = {k.replace("visual.", "visual.trunk.", 1): v.float() for k, v in tensors.items()}
        self.load_state_dict(named)

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """pixels: uint8 [N, 3, size, size] -> float32 [N, num_tokens, hidden_size].

        Images run one by one: in a batch, the last bits depend on its size. That costs 15 % for
        eight images on two CPU threads (254 against 218 ms).
        """
        return torch.cat([self._encode_one(image[None]) for image in pixels])

    def _encode_one(self, pixels: Tensor) -> Tensor:
        size = self.config.image_size
        assert pixels.shape == (1, 3, size, size) and pixels.dtype == torch.uint8
        x = pixels.to(self.scale.device).float() / self.scale - self.shift
        out: Tensor = self.resampler(self.visual(x))
        return out

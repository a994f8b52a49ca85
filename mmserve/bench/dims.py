"""Dimensions of public models, so that speed can be measured where no weights are.

Data only: imports no library.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TextDims:
    """A decoder of transformers' `family`."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    theta: float


@dataclass(frozen=True)
class TowerDims:
    """`latent_grid` None: every patch is a token. LLaVA reads the layer before the last: 23.
    Qwen's tower joins four patches to a token itself."""

    family: str  # siglip | clip | qwen2.5-vl
    layers: int
    hidden: int
    heads: int
    mlp: int
    patch: int  # pixels
    image_size: int  # pixels
    latent_grid: tuple[int, int] | None

    @property
    def side(self) -> int:
        """Patches."""
        return self.image_size // self.patch

    @property
    def num_tokens(self) -> int:
        rows, columns = self.latent_grid or (self.side, self.side)
        return rows * columns


@dataclass(frozen=True)
class ModelShape:
    name: str
    text: TextDims
    vision: TowerDims
    max_model_len: int = 32_768  # tokens
    ordered: bool = False  # whether an image's tokens see only those before them


MISTRAL_7B = TextDims("mistral", 32, 4096, 32, 8, 128, 14336, 32000, 1e6)
QWEN_7B = TextDims("qwen2", 28, 3584, 28, 4, 128, 18944, 152064, 1e6)  # with q, k, v biases
LLAMA_7B = TextDims("llama", 32, 4096, 32, 32, 128, 11008, 32064, 1e4)

SO400M = TowerDims("siglip", 27, 1152, 16, 4304, patch=14, image_size=980, latent_grid=(8, 8))
CLIP_L = TowerDims("clip", 23, 1024, 16, 4096, patch=14, image_size=336, latent_grid=None)
QWEN_VIT = TowerDims(
    "qwen2.5-vl", 32, 1280, 16, 3420, patch=14, image_size=980, latent_grid=(35, 35)
)
NO_TOWER = TowerDims("siglip", 1, 64, 1, 64, patch=14, image_size=56, latent_grid=(2, 2))

SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("mistral-7b", MISTRAL_7B, NO_TOWER),
        ModelShape("qwen2.5-7b", QWEN_7B, NO_TOWER),
        # Positions are counted singly, not by axis.
        ModelShape("qwen2.5-vl-7b", QWEN_7B, QWEN_VIT, ordered=True),
        ModelShape("idefics2-8b", MISTRAL_7B, SO400M),
        ModelShape("llava-7b", LLAMA_7B, CLIP_L),
    )
}

DEFAULT = "default"  # the default model, with its weights
SHAPE_NAMES = (DEFAULT, *SHAPES)

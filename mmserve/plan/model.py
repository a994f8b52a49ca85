"""A model's sizes without its weights: from a name, or from a checkpoint's config.json.

Owns how a name becomes sizes. Decoders are built on PyTorch's meta device, so that what they weigh
is what transformers makes of their config. Knows nothing of machines.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from mmserve.bench.dims import NO_TOWER, SHAPES, ModelShape, TextDims, TowerDims
from mmserve.bench.family_shapes import FAMILIES
from mmserve.bench.shapes import text_config
from mmserve.bench.sizes import Sizes, kv_bytes_per_token
from mmserve.model.weights import Loaded

# SmolLM2-135M, and what one image costs by `Sizes.of` with its weights.
DEFAULT_NAME = "smolvision-135m"
DEFAULT_TEXT = TextDims("llama", 30, 576, 9, 3, 64, 1536, 49152, 1e5)
DEFAULT_IMAGE_FLOPS, DEFAULT_IMAGE_TOKENS = 2_678_823_904, 64
QWEN = "qwen2.5-vl"
PATCHES_A_TOKEN = 4  # of Qwen's tower, joined
WINDOW_PATCHES = 64  # that a patch of Qwen's tower sees in most layers
WHOLE_LAYERS = 4  # of Qwen's tower, in which it sees all
IMAGE_TOKENS = ("mm_tokens_per_image", "image_seq_length")  # as configs say it


@dataclass(frozen=True)
class PlannedModel:
    name: str
    sizes: Sizes  # `image_tokens` 0: takes no images
    layers: int
    kv_bytes: int  # of a token, in all layers
    windows: tuple[int | None, ...]  # tokens a layer sees at most, by layer
    bytes_held: int  # all weights

    def kv_read(self, tokens: float) -> float:
        """Bytes of KV of a context, windows heeded."""
        seen = sum(min(tokens, window or tokens) for window in self.windows)
        return self.kv_bytes * seen / len(self.windows)

    @property
    def image_kv(self) -> int:
        """Bytes in the vision pool."""
        return self.kv_bytes * self.sizes.image_tokens

    def on_cpu(self) -> PlannedModel:
        """Weights in 8 bits, KV in float32."""
        half = self.sizes.itemsize
        return dataclasses.replace(
            self,
            sizes=dataclasses.replace(self.sizes, itemsize=1),
            kv_bytes=self.kv_bytes * 4 // half,
            bytes_held=self.bytes_held // half,
        )


def find_model(name: str, image_tokens: int | None = None) -> PlannedModel:
    """The default model, one of `SHAPES` or `FAMILIES`, a checkpoint's folder or hub id, of which
    config.json alone is read. `image_tokens`: of a checkpoint's image, where its config leaves that
    open. Raises ValueError."""
    if name == DEFAULT_NAME:
        shape = ModelShape(name, DEFAULT_TEXT, NO_TOWER)
        planned = _planned(name, _skeleton(text_config(shape)))
        return _seeing(planned, DEFAULT_IMAGE_FLOPS, DEFAULT_IMAGE_TOKENS)
    if name in SHAPES:
        shape = SHAPES[name]
        planned = _planned(name, _skeleton(text_config(shape)))
        if shape.vision is NO_TOWER:
            return planned
        flops = tower_flops(shape.vision, shape.text.hidden)
        held = planned.bytes_held + planned.sizes.itemsize * _tower_weights(shape.vision)
        planned = dataclasses.replace(planned, bytes_held=held)
        return _seeing(planned, flops, shape.vision.num_tokens)
    if name in FAMILIES:  # their towers have one layer: text only
        return _planned(name, _skeleton(AutoConfig.for_model(**FAMILIES[name])))
    return _checkpoint(name, image_tokens)


def tower_flops(dims: TowerDims, width: int) -> int:
    """Of one image: products of all patches, their attention, and what makes tokens of them."""
    patches, hidden = dims.side**2, dims.hidden
    own = dims.family == QWEN
    whole = WHOLE_LAYERS if own else dims.layers
    seen = whole * patches + (dims.layers - whole) * WINDOW_PATCHES
    trunk = 2 * patches * _tower_weights(dims) + 4 * patches * hidden * seen
    if own:
        wide = PATCHES_A_TOKEN * hidden
        return trunk + 2 * dims.num_tokens * wide * (wide + width)
    if dims.latent_grid is None:
        return trunk + 2 * patches * (hidden * width + width**2)
    return trunk + 3 * 2 * patches * 2 * hidden**2  # keys and values in the compressor's layers


def _tower_weights(dims: TowerDims) -> int:
    """Of all layers."""
    matrices = 3 if dims.family == QWEN else 2
    return dims.layers * (4 * dims.hidden**2 + matrices * dims.hidden * dims.mlp)


def _seeing(model: PlannedModel, flops: int, tokens: int) -> PlannedModel:
    sizes = dataclasses.replace(model.sizes, image_flops=flops, image_tokens=tokens)
    return dataclasses.replace(model, sizes=sizes)


def _skeleton(config: Any) -> Any:
    """The model without weights."""
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(config, dtype=torch.bfloat16)


@dataclass(frozen=True)
class _Bare:
    """As much of a loaded model as `Sizes.of` counts."""

    lm: Any


def _planned(name: str, lm: Any) -> PlannedModel:
    config = lm.config.get_text_config()
    sizes = Sizes.of(cast(Loaded, _Bare(lm)))
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return PlannedModel(
        name=name,
        sizes=sizes,
        layers=config.num_hidden_layers,
        kv_bytes=kv_bytes_per_token(lm),
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        bytes_held=sizes.itemsize * sum(p.numel() for p in lm.parameters()),
    )


def _checkpoint(name: str, image_tokens: int | None) -> PlannedModel:
    try:
        config: Any = AutoConfig.from_pretrained(name)
        lm = _skeleton(config)
    except (OSError, ValueError, KeyError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        known = ", ".join((DEFAULT_NAME, *SHAPES))
        raise ValueError(
            f"no config of {name!r} that transformers can read ({said[0]}); names known are "
            f"{known} and those of mmserve bench families"
        ) from None
    planned = _planned(name, lm)
    vision = getattr(config, "vision_config", None)
    if vision is None:
        return planned
    said_tokens = (image_tokens, *(getattr(config, n, None) for n in IMAGE_TOKENS))
    tokens = next((n for n in said_tokens if n), None)
    if tokens is None:
        raise ValueError(f"{name}'s config leaves an image's size open: say --image-tokens")
    return _seeing(planned, 2 * _others(lm) * _patches(vision, tokens), tokens)


def _others(lm: Any) -> int:
    """Weights that are not the language model's."""
    parts = (lm.get_decoder(), lm.get_output_embeddings(), lm.get_input_embeddings())
    known = {id(p) for part in parts for p in part.parameters()}
    return sum(p.numel() for p in lm.parameters() if id(p) not in known)


def _patches(vision: Any, tokens: int) -> int:
    """Of an image of so many tokens."""
    merged: int | None = getattr(vision, "spatial_merge_size", None)
    if merged:
        return tokens * merged**2
    image, patch = getattr(vision, "image_size", None), getattr(vision, "patch_size", None)
    if isinstance(image, int) and isinstance(patch, int):
        return (image // patch) ** 2
    return tokens

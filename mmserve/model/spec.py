"""A model's description: one JSON of `configs/models/`, as a frozen dataclass.

Owns the JSON's words and the identity of the weights. Reads no weights beyond hashing their files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmserve.model.fetch import BaseModelSpec, ModelUnavailableError, sha256_of
from mmserve.model.supported import MODELS, native_json
from mmserve.vision.crops import Crops
from mmserve.vision.encoder import EncoderConfig
from mmserve.vision.model import VisionConfig
from mmserve.vision.perceiver import CompressorConfig, Source
from mmserve.vision.preprocess import fingerprint


@dataclass(frozen=True)
class LoraSpec:
    file: Path
    alpha: float


@dataclass(frozen=True)
class Windows:
    """Layers read the last `window` tokens, but for every `full_every`th, which reads all."""

    window: int
    full_every: int

    def __post_init__(self) -> None:
        """Raises ValueError for what is no pattern."""
        if self.window < 1 or self.full_every < 2:
            raise ValueError(f"windows of {self.window}, full every {self.full_every}: no pattern")

    def of(self, layer: int) -> int | None:
        """What a layer reads, by its number from 0; None: all."""
        return self.window if (layer + 1) % self.full_every else None


@dataclass(frozen=True)
class ModelSpec:
    """What a model is made of and how it is spoken to. Lengths in tokens, sizes in pixels."""

    name: str
    max_model_len: int
    rope_theta: float
    base: BaseModelSpec
    lora: LoraSpec | None  # None: the base model's own text weights
    vision: VisionConfig
    vision_files: tuple[Path, ...]
    system_prompt: str
    image_prefix: (
        str  # before an image's tokens; {k} counts images through the conversation, from 1
    )
    image_suffix: str  # after them
    licences: dict[str, str]
    weights_id: bytes  # [32]: equal ids, equal functions from pixels and tokens to KV
    windows: Windows | None = None  # None: every layer reads all

    @property
    def num_image_tokens(self) -> int:
        """Visual tokens an image becomes that is seen whole, at most."""
        return self.vision.num_tokens

    def image_tokens(self, most: int | None) -> Mapping[str, int]:
        """Those by the detail asked for, as `VisionConfig.tokens_of` says."""
        return self.vision.tokens_of(most)

    def image_crops(self, most: int | None) -> Crops | None:
        """As `VisionConfig.crops_within` says."""
        return self.vision.crops_within(most)

    @property
    def image_size(self) -> int:
        return self.vision.image_size


def load_spec(model: str, lora: bool = True) -> ModelSpec:
    """Reads what `native_json` finds; `lora` False leaves the adapter out.

    Raises `ModelUnavailableError` for an unknown name and `KeyError` or `TypeError` for a
    malformed file.
    """
    path = native_json(model)
    if path is None:
        known = ", ".join(sorted(p.stem for p in MODELS.glob("*.json")))
        raise ModelUnavailableError(
            f"no model {model!r}; known are {known}, or give the path of a JSON"
        )
    text = path.read_bytes()
    data: dict[str, Any] = json.loads(text)
    adapter = data.get("lora") if lora else None
    adapter = adapter and LoraSpec(path.parent / adapter["file"], float(adapter["alpha"]))
    base = BaseModelSpec(**data["base"])
    files = tuple(path.parent / name for name in data["vision"]["files"])
    hashes = [sha256_of(f) for f in (*files, *([adapter.file] if adapter else []))]
    weights = " ".join([base.gguf_sha256, *hashes])
    return ModelSpec(
        name=data["name"],
        max_model_len=data["max_model_len"],
        rope_theta=data["rope_theta"],
        base=base,
        lora=adapter,
        vision=read_vision(data["vision"]),
        vision_files=files,
        system_prompt=data["prompt"]["system"],
        image_prefix=data["prompt"]["image_prefix"],
        image_suffix=data["prompt"]["image_suffix"],
        licences=data["licences"],
        weights_id=fingerprint(("spec", text), ("weights", weights.encode())),
        windows=Windows(**data["windows"]) if "windows" in data else None,
    )


def read_vision(data: Mapping[str, Any]) -> VisionConfig:
    """Of a description's `vision`. Raises as `load_spec`, and ValueError for sizes that do not go
    together."""
    preprocess, encoder, compressor = data["preprocess"], data["encoder"], dict(data["compressor"])
    levels = {
        int(stride): tuple(Source(**source) for source in sources)
        for stride, sources in compressor.pop("levels").items()
    }
    grid, sigmas = compressor.pop("latent_grid"), compressor.pop("local_sigmas")
    nested = compressor.pop("nested", ())
    return VisionConfig(
        encoder=EncoderConfig(
            encoder["vision_cfg"], tuple(encoder["features"]), encoder["fold_batch_norm"]
        ),
        compressor=CompressorConfig(
            image_size=preprocess["size"],
            levels=levels,
            latent_grid=(grid[0], grid[1]),
            local_sigmas=tuple(sigmas),
            nested=tuple(nested),
            **compressor,
        ),
        mean=tuple(preprocess["mean"]),
        std=tuple(preprocess["std"]),
        details=data.get("details", {}),
        crops=Crops(**data["crops"]) if "crops" in data else None,
    )

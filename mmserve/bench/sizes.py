"""How much a model must read and compute: the arithmetic behind every bound.

Owns bytes and operations of one model, taken from its modules before the engine fuses them. Knows
nothing of clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmserve.bench.ceilings import Ceilings
from mmserve.engine.meter import image_flops
from mmserve.model.loader import LoadedModel


@dataclass(frozen=True)
class Sizes:
    weights: int  # read once a decode step: all matrices but the embedding's rows
    itemsize: int  # bytes of a weight
    layer_weights: int  # a token passes through, the head not counted
    attention_width: int  # layers x heads x head_dim
    image_flops: int  # of the vision path, one image
    image_tokens: int

    @staticmethod
    def of(loaded: LoadedModel) -> Sizes:
        """Runs one blank image through the vision path."""
        lm: Any = loaded.lm
        config = lm.config
        head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        head = lm.lm_head.weight  # the embedding itself, where the two are tied
        layers = list(lm.model.layers.parameters())
        return Sizes(
            weights=sum(p.numel() for p in (*layers, head)),
            itemsize=head.element_size(),
            layer_weights=sum(p.numel() for p in layers),
            attention_width=config.num_hidden_layers * config.num_attention_heads * head_dim,
            image_flops=image_flops(loaded),
            image_tokens=loaded.spec.num_image_tokens,
        )

    @property
    def weight_bytes(self) -> int:
        return self.weights * self.itemsize

    def prefill_flops(self, tokens: int) -> float:
        """2 a weight and token, and causal attention: 4 width n^2 / 2."""
        return 2.0 * self.layer_weights * tokens + 2.0 * self.attention_width * tokens**2

    def step_seconds(self, kv_bytes: float, ceilings: Ceilings) -> float:
        """Least time of a decode step that reads all weights and `kv_bytes`."""
        return (self.weight_bytes + kv_bytes) / ceilings.bytes_per_s

    def first_token_seconds(self, new_images: int, ceilings: Ceilings) -> float:
        """Least time to a first token: weights read once, and the arithmetic of new images."""
        decoder = 2.0 * self.layer_weights * self.image_tokens
        images = new_images * (self.image_flops + decoder) / ceilings.flops_per_s
        return self.step_seconds(0, ceilings) + images

    def shown(self) -> dict[str, float]:
        return {
            "GB of weights": self.weight_bytes / 1e9,
            "TFLOP an image": self.image_flops / 1e12,
            "tokens an image": float(self.image_tokens),
        }

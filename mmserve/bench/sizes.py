"""How much a model must read and compute: the arithmetic behind every bound.

Owns bytes and operations of one model, taken from its modules before the engine fuses them. Knows
nothing of clocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mmserve.bench.ceilings import Ceilings
from mmserve.engine.meter import image_flops
from mmserve.model.loader import LoadedModel
from mmserve.model.weights import Loaded


def head_dim(text_config: Any) -> int:
    given = getattr(text_config, "head_dim", None)
    return int(given or text_config.hidden_size // text_config.num_attention_heads)


def kv_bytes_per_token(lm: Any) -> int:
    """Of all layers, windows or not, in the dtype of the weights."""
    config = lm.config.get_text_config()
    heads = config.num_hidden_layers * config.num_key_value_heads
    return int(2 * heads * head_dim(config) * lm.dtype.itemsize)


@dataclass(frozen=True)
class Sizes:
    weights: int  # read once a decode step: all matrices but the embedding's rows
    itemsize: int  # bytes of a weight
    layer_weights: int  # a token passes through, the head not counted
    attention_width: int  # layers x heads x head_dim
    image_flops: int  # of the vision path, one image
    image_tokens: int

    @staticmethod
    def of(loaded: Loaded) -> Sizes:
        """Runs one blank image through the vision path of a native model. Of a checkpoint nothing
        is counted but what text alone passes through."""
        lm: Any = loaded.lm
        config = lm.config.get_text_config()
        head = lm.get_output_embeddings().weight  # the embedding itself, where the two are tied
        # transformers leaves a layer that looks at images out, its MLP too, where there are none.
        layers = [layer for layer in lm.get_decoder().layers if not hasattr(layer, "cross_attn")]
        layer_weights = sum(p.numel() for layer in layers for p in layer.parameters())
        sizes = Sizes(
            weights=layer_weights + head.numel(),
            itemsize=head.element_size(),
            layer_weights=layer_weights,
            attention_width=len(layers) * config.num_attention_heads * head_dim(config),
            image_flops=0,
            image_tokens=0,
        )
        if not isinstance(loaded, LoadedModel):
            return sizes
        flops, tokens = image_flops(loaded), loaded.spec.num_image_tokens
        return replace(sizes, image_flops=flops, image_tokens=tokens)

    @property
    def weight_bytes(self) -> int:
        return self.weights * self.itemsize

    def prefill_flops(self, tokens: int) -> float:
        """2 a weight and token, and causal attention: 4 width n^2 / 2."""
        return 2.0 * self.layer_weights * tokens + 2.0 * self.attention_width * tokens**2

    def step_seconds(self, kv_bytes: float, ceilings: Ceilings) -> float:
        """Least time of a decode step that reads all weights and `kv_bytes`."""
        return (self.weight_bytes + kv_bytes) / ceilings.bytes_per_s

    def first_token_seconds(self, new_images: int, ceilings: Ceilings, again: int = 0) -> float:
        """Least time to a first token: weights read once, and the arithmetic of new images and of
        those that pass the decoder `again`."""
        decoder = 2.0 * self.layer_weights * self.image_tokens
        flops = new_images * self.image_flops + (new_images + again) * decoder
        return self.step_seconds(0, ceilings) + flops / ceilings.flops_per_s

    def shown(self) -> dict[str, float]:
        return {
            "GB of weights": self.weight_bytes / 1e9,
            "TFLOP an image": self.image_flops / 1e12,
            "tokens an image": float(self.image_tokens),
        }

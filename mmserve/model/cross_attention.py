"""Layers that look at images and at nothing else (Llama 3.2 Vision).

Owns their place in the decoder: keys and values come from the vision pool, projected once an image.
Knows nothing of sequences or pools' layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


class CrossLayer(nn.Module):
    """Stands where a model's cross attention stood."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention = attention
        self.layer_idx: int = attention.layer_idx

    def project(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """An image's states [n, hidden] -> keys and values, each [n, Hkv, D]."""
        own = self.attention
        k, v = (
            projection(states).view(len(states), own.num_key_value_heads, own.head_dim)
            for projection in (own.k_proj, own.v_proj)
        )
        return own.k_norm(k), v

    def forward(self, hidden_states: Tensor, *, step: Any, **_: Any) -> tuple[Tensor, None]:
        """hidden_states [1, T, hidden] -> the same. A row that sees no image gets zeros."""
        own, count = self.attention, hidden_states.shape[1]
        q = own.q_norm(own.q_proj(hidden_states[0]).view(count, own.num_heads, own.head_dim))
        read = step.look(self.layer_idx, q, own.num_key_value_heads, own.scaling)
        return own.o_proj(read.reshape(count, -1))[None], None


class CrossAttention:
    """All of a decoder's cross-attention layers."""

    def __init__(self, layers: dict[int, CrossLayer]) -> None:
        self._layers = layers

    @classmethod
    def install(cls, decoder: Any) -> CrossAttention | None:
        """Take the place of a decoder's cross attention, where it has any."""
        found = {}
        for index, layer in enumerate(decoder.layers):
            if hasattr(layer, "cross_attn"):
                found[index] = layer.cross_attn = CrossLayer(layer.cross_attn)
        return cls(found) if found else None

    def project(self, states: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(layer, keys, values) of an image's states [n, hidden]."""
        for index, layer in self._layers.items():
            yield (index, *layer.project(states))

    def arguments(self, seen: Tensor | None) -> dict[str, Any]:
        """What the decoder is told: `seen` [T] bool, which rows see an image; None: none does.

        transformers then leaves these layers out; their output would be nothing.
        """
        if seen is None:
            return {}
        first = next(iter(self._layers.values()))
        mask = seen.to(first.attention.q_proj.weight.dtype)[None, None, :, None]
        return {"cross_attention_states": mask, "full_text_row_masked_out_mask": mask}

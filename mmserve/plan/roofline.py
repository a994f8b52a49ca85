"""What a model does on a machine: seconds of a decode step, of a first token, and the pools.

Owns the roofline: weights read once a step, KV of every sequence, arithmetic of prefill and vision,
each at the machine's rate and at the share of it that was measured. Knows nothing of arrivals.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmserve.plan.hardware import Hardware
from mmserve.plan.model import PlannedModel
from mmserve.plan.traffic import Traffic

SPARE = 0.1  # of memory: activations, graphs, the allocator's gaps
LEAST_SHARE = 0.1  # of the pools' memory, for each of the two that is used


@dataclass(frozen=True)
class Roofline:
    model: PlannedModel
    hardware: Hardware

    def step_seconds(self, batch: float, context: float) -> float:
        """A decode step of `batch` sequences of `context` tokens each."""
        share = self.hardware.efficiency
        read = self.model.sizes.weight_bytes + batch * self.model.kv_read(context)
        device = read / (self.hardware.bytes_per_s * share.read)
        device += self.model.layers * share.layer_s + batch * share.row_s
        return max(device, share.host_s + batch * share.host_row_s)

    def tokens_per_s(self, batch: float, context: float) -> float:
        """Of all sequences together."""
        return batch / self.step_seconds(batch, context)

    def first_token_seconds(
        self, text: float, new_images: float = 0, known_tokens: float = 0
    ) -> float:
        """Of a request alone on the machine, `text` of whose tokens are new; of `known_tokens`, of
        images or text, the KV is there."""
        sizes, share = self.model.sizes, self.hardware.efficiency
        rate = self.hardware.flops_per_s
        images = 2.0 * sizes.layer_weights * sizes.image_tokens * new_images
        arithmetic = (sizes.prefill_flops(int(text)) + images) / (rate * share.prefill)
        read = sizes.weight_bytes / (self.hardware.bytes_per_s * share.read)
        vision = new_images * sizes.image_flops / (rate * share.vision)
        fixed = share.first_s + self.model.layers * share.layer_s + known_tokens * share.known_s
        return fixed + max(read, arithmetic) + vision


@dataclass(frozen=True)
class Pools:
    """What fits beside the weights of one replica."""

    text_bytes: int
    vision_bytes: int
    text_tokens: int
    images: int
    sessions: int  # whole conversations at their end


def size_pools(model: PlannedModel, hardware: Hardware, traffic: Traffic) -> Pools:
    """Memory shared as conversations of `traffic` need it. Raises ValueError where nothing fits."""
    free = hardware.memory * (1 - SPARE) - model.bytes_held
    if free <= 0:
        raise ValueError(
            f"{model.name} holds {model.bytes_held / 1e9:.1f} GB of weights; {hardware.name} has "
            f"{hardware.memory / 1e9:.1f} GB, a tenth of it spare"
        )
    text = model.kv_read(traffic.text_tokens(traffic.turns))
    vision = traffic.images * traffic.new_share * model.image_kv
    share = text / (text + vision)
    if vision:
        share = min(max(share, LEAST_SHARE), 1 - LEAST_SHARE)
    text_bytes = int(free * share)
    vision_bytes = int(free - text_bytes) if vision else 0
    return Pools(
        text_bytes=text_bytes,
        vision_bytes=vision_bytes,
        text_tokens=text_bytes // model.kv_bytes,
        images=vision_bytes // model.image_kv if vision else 0,
        sessions=int(text_bytes / text),
    )

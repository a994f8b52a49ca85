"""A decoder's embedding and rotary angles on a GPU, one launch each.

Owns which of transformers' modules the two kernels stand for: those that give the same, which is
tried. Knows nothing of layers, sequences or scheduling.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmserve.kernels import prelude
from mmserve.model.adapter import Adapter
from mmserve.model.rope import Rope

TRIED = (0, 1, 7, 100, 4095)  # positions


class CUDARope(nn.Module):
    """Drop-in for a `Rope` whose regimes each have their frequencies, by layer type or for all."""

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self.rope = rope
        self._known: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor, position_ids: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        """As `Rope.forward`, of one axis."""
        inverse, scales = self._known.get(more) or self._learn(more)
        count, width = position_ids.shape[1], 2 * inverse.shape[1]
        cos, sin = (x.new_empty(1, count, width) for _ in range(2))
        regimes = self.rope.regimes if len(scales) > 1 else None
        prelude.angles(position_ids[0], regimes, inverse, scales, cos[0], sin[0])
        return cos, sin

    def _learn(self, more: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        before = "".join(f"{kind}_" for kind in more)
        modules = list(self.rope.by_regime)
        inverse = torch.stack([getattr(m, f"{before}inv_freq").float() for m in modules])
        scales = [float(getattr(m, f"{before}attention_scaling")) for m in modules]
        self._known[more] = inverse, inverse.new_tensor(scales)
        return self._known[more]


class CUDAEmbedding:
    """Token ids to rows, where the embedding is a table and at most a scale."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        found = getattr(adapter.embedding, "embed_scale", None)
        # It is rounded to the table's dtype before it is multiplied by.
        self._scale = None if found is None else float(torch.as_tensor(found).to(adapter.dtype))

    def __call__(self, ids: Tensor, previous: Tensor) -> Tensor:
        """ids [T] of any integer dtype, -(n + 1) for previous[n] -> [T, hidden]."""
        table: Tensor = self._adapter.embedding.weight
        out = table.new_empty(len(ids), table.shape[1])
        prelude.embed(ids, previous, table, out, self._scale)
        return out

    @classmethod
    @torch.inference_mode()
    def of(cls, adapter: Adapter) -> CUDAEmbedding | None:
        """None where the model's own gives something else."""
        mine, ids = cls(adapter), torch.arange(3, device=adapter.device)
        same = torch.equal(mine(ids.int(), ids), adapter.embed(ids))
        return mine if same else None


@torch.inference_mode()
def install_rope(adapter: Adapter) -> None:
    """Put ours in the place of a decoder's rotary module, where it gives the same for every kind of
    layer."""
    rope = adapter.rope
    if type(rope) is not Rope or adapter.axes > 1:
        return
    ours, kinds = CUDARope(rope), _kinds(adapter)
    positions = torch.tensor([TRIED], device=adapter.device)
    x = torch.zeros(1, 1, adapter.hidden_size, device=adapter.device, dtype=adapter.dtype)
    if kinds and all(_gives_the_same(ours, x, positions, kind) for kind in kinds):
        adapter.decoder.rotary_emb = ours


def _gives_the_same(ours: CUDARope, x: Tensor, positions: Tensor, kind: tuple[str, ...]) -> bool:
    try:
        mine = ours(x, positions, *kind)
    except AttributeError:  # the frequencies have another name
        return False
    pairs = list(zip(mine, ours.rope(x, positions, *kind), strict=True))
    close = 2 * torch.finfo(x.dtype).eps
    return all(a.shape == b.shape and bool(((a - b).abs() <= close).all()) for a, b in pairs)


def _kinds(adapter: Adapter) -> set[tuple[str, ...]]:
    """What the decoder may ask its angles for besides positions."""
    if adapter.rope is not None and hasattr(adapter.rope.by_regime[0], "inv_freq"):
        return {()}
    return {(kind,) for kind in getattr(adapter.config, "layer_types", None) or ()}

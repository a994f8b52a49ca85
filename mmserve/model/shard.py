"""A decoder's weights split over ranks: each has some of the heads and some of the MLP's width.

Owns which matrices are split along which side, as the family's own plan in transformers says it,
and the sum behind those whose inputs are split. Knows nothing of processes: who adds is told later.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# Of families that declare no plan for their layers, but name them as nearly all do.
USUAL = {
    **{f"layers.*.self_attn.{x}_proj": "colwise" for x in "qkv"},
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}

Split = Callable[[Any], None]  # leaves of a causal LM a rank's part; raises ValueError


class Total:
    """Adds a tensor up over all ranks, in place. Until it is connected it adds nothing, so that a
    model can be listened to by one rank alone. `first`: what all have comes from this rank."""

    def __init__(self, *, first: bool) -> None:
        self.first = first
        self._add: Callable[[Tensor], Any] | None = None

    def connect(self, add: Callable[[Tensor], Any]) -> None:
        self._add = add

    def __call__(self, x: Tensor) -> Tensor:
        if self._add is not None:
            self._add(x)
        return x


class SplitInputs(nn.Module):
    """x [..., K / ranks] -> [..., N], of a linear layer whose other inputs are with other ranks."""

    def __init__(self, weight: Tensor, bias: Tensor | None, total: Total) -> None:
        super().__init__()
        self.weight, self.total = nn.Parameter(weight, requires_grad=False), total
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.total(functional.linear(x, self.weight))
        return out if self.bias is None else out + self.bias


def total_of(linear: Any) -> Total | None:
    """What the outputs of a layer are added up by; None where they are whole."""
    return linear.total if isinstance(linear, SplitInputs) else None


@torch.inference_mode(False)
def split_decoder(lm: Any, rank: int, ranks: int, total: Total) -> None:
    """Leave of a causal LM's decoder what `rank` of `ranks` computes, in place.

    Raises ValueError for a model that cannot be split, or not by this number.
    """
    decoder = lm.get_decoder()
    plan = {**(getattr(decoder.config, "base_model_tp_plan", None) or {})}
    plan = plan if any(kind == "rowwise" for kind in plan.values()) else USUAL
    kinds = [(_pattern(name), kind) for name, kind in plan.items()]
    linears = [
        (name, module)
        for name, module in decoder.named_modules()
        if name.startswith("layers.") and isinstance(module, nn.Linear)
    ]
    for name, linear in linears:
        kind = next((kind for pattern, kind in kinds if pattern.fullmatch(name)), "nothing")
        parent_name, _, own = name.rpartition(".")
        parent: Any = decoder.get_submodule(parent_name)
        if kind == "colwise":
            _keep_outputs(linear, *_part(own, linear.out_features, parent, rank, ranks))
        elif kind == "rowwise":
            width = linear.in_features // ranks
            weight = linear.weight.detach()[:, rank * width :][:, :width].clone()
            setattr(parent, own, SplitInputs(weight, linear.bias, total))
        else:
            raise ValueError(
                f"{type(lm).__name__} cannot be split over ranks: of {name} its plan says {kind}, "
                "and what is known is colwise and rowwise"
            )


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", r"\d+"))


def _part(name: str, outputs: int, parent: Any, rank: int, ranks: int) -> tuple[int, int]:
    """The first output of a rank's, and how many there are. Raises ValueError."""
    if name not in ("q_proj", "k_proj", "v_proj"):
        if outputs % ranks:
            raise ValueError(f"an MLP {outputs} wide cannot be split over {ranks} ranks")
        return rank * (outputs // ranks), outputs // ranks
    dim = int(parent.head_dim)
    heads = outputs // dim
    if heads % ranks == 0:
        return rank * (outputs // ranks), outputs // ranks
    if name == "q_proj":
        raise ValueError(f"{heads} attention heads cannot be split over {ranks} ranks")
    if ranks % heads:
        raise ValueError(
            f"{heads} heads of keys and values cannot be shared by {ranks} ranks: one of the two "
            "numbers has to divide the other"
        )
    return rank * heads // ranks * dim, dim  # several ranks hold the same one


def _keep_outputs(linear: nn.Linear, first: int, count: int) -> None:
    kept = slice(first, first + count)
    linear.weight = nn.Parameter(linear.weight.detach()[kept].clone(), requires_grad=False)
    if linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias.detach()[kept].clone(), requires_grad=False)
    linear.out_features = count

"""What a trained head borrows of the model that is served.

Owns the way from a runner to `TargetParts`. Knows nothing of heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmserve.engine.graphs import Graphs
from mmserve.engine.model_runner import ModelRunner
from mmserve.kernels.chain import has_kernels
from mmserve.model.fuse import DenseLinear, Int8Linear
from mmserve.spec.target_parts import Likeliest, Linear, NoCaptures, TargetParts, likeliest


def target_parts(runner: ModelRunner) -> TargetParts:
    """Of a runner's fused model. A head's products are held as its own are."""
    adapter = runner.adapter

    def linear(weight: Tensor, bias: Tensor | None) -> Linear:
        narrow = runner.dtype == "int8" and weight.shape[1] % 2 == 0
        made: Linear = (Int8Linear if narrow else DenseLinear)(weight, bias)
        return made

    on_gpu = runner.device.type == "cuda"
    return TargetParts(
        hidden_size=adapter.hidden_size,
        num_layers=len(adapter.decoder.layers),
        vocab_size=adapter.vocab_size,
        embed=adapter.embed,
        logits=adapter.logits,
        head_rows=lambda ids: _rows(runner, ids),
        device=runner.device,
        dtype=adapter.dtype,
        linear=linear,
        likeliest=_likeliest(runner),
        grown=runner.grown,
        captures=Graphs(runner.device, "drafts", must=False) if on_gpu else NoCaptures(),
    )


def _likeliest(runner: ModelRunner) -> Likeliest:
    if not has_kernels(runner.device):
        return likeliest
    from mmserve.kernels import likeliest as quick  # imports Triton

    def found(scores: Tensor, count: int, *, normed: bool) -> tuple[Tensor, Tensor]:
        fits = scores.shape[1] <= quick.MAX_WIDTH
        return (quick.likeliest if fits else likeliest)(scores, count, normed=normed)

    return found


@torch.inference_mode()
def _rows(runner: ModelRunner, ids: Tensor) -> Tensor:
    """Rows of the output matrix, or what it makes of each direction where it is packed."""
    adapter = runner.adapter
    head: Any = adapter.model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor):
        if getattr(adapter.config, "tie_word_embeddings", False):
            weight = adapter.embedding.weight
        else:
            unit = torch.eye(adapter.hidden_size, device=runner.device, dtype=adapter.dtype)
            return adapter.logits(unit)[:, ids].T.contiguous()
    rows: Tensor = weight[ids].clone()
    return rows

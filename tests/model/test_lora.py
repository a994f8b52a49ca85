"""LoRA merging: the sum of base and adapter, and nothing by halves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mmserve.model.lora import merge_lora


def layers() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 3, bias=False))


def weight(model: nn.Sequential, layer: int) -> Tensor:
    return model.get_parameter(f"{layer}.weight")


def adapter(layer: str, rows: int, columns: int, rank: int = 2) -> dict[str, Tensor]:
    return {
        f"base_model.model.{layer}.lora_A.weight": torch.randn(rank, columns).bfloat16(),
        f"base_model.model.{layer}.lora_B.weight": torch.randn(rows, rank).bfloat16(),
    }


def test_a_merged_layer_is_the_base_plus_the_scaled_product() -> None:
    model, tensors = layers(), adapter("0", 4, 6)
    x = torch.randn(5, 6)
    down, up = (t.float() for t in tensors.values())
    expected = x @ weight(model, 0).T + (32 / 2) * (x @ down.T @ up.T)
    merge_lora(model, tensors, alpha=32)
    torch.testing.assert_close(x @ weight(model, 0).T, expected)
    assert torch.equal(weight(model, 1), weight(layers(), 1))


def test_other_weights_that_share_storage_do_not_change() -> None:
    model = layers()
    before = weight(model, 0)
    copy = before.clone()
    merge_lora(model, adapter("0", 4, 6), alpha=32)
    assert torch.equal(before, copy) and not torch.equal(weight(model, 0), copy)


@pytest.mark.parametrize(
    "tensors",
    [
        dict(list(adapter("0", 4, 6).items())[:1]),
        dict(list(adapter("0", 4, 6).items())[1:]),
        adapter("7", 4, 6),
        adapter("0", 6, 4),
        {**adapter("0", 4, 6), "base_model.model.0.lora_magnitude": torch.ones(4)},
    ],
    ids=["no B", "no A", "no such layer", "wrong shape", "foreign tensor"],
)
def test_a_file_that_does_not_fit_is_refused_before_anything_changes(
    tensors: dict[str, Tensor],
) -> None:
    model = layers()
    with pytest.raises(ValueError):
        merge_lora(model, tensors, alpha=32)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), layers().parameters(), strict=True)
    )

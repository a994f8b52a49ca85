"""Reading and writing heads, 8-bit matrices too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmserve.spec.head_files import HeadError, narrowed, read_head, widened, write_head


def test_matrices_come_back_within_half_a_step_and_everything_else_exactly(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.randn(7, 12) * torch.logspace(-3, 3, 7)[:, None],
        "norm.weight": torch.randn(12),
        "d2t": torch.arange(7),
        "t2d": torch.tensor([True, False]),
    }
    write_head(tmp_path, {"hidden_size": 12}, narrowed(tensors))
    file = read_head(tmp_path)
    assert file.config == {"hidden_size": 12}
    assert set(file.tensors) == set(tensors)
    step = tensors["a.weight"].abs().amax(1, keepdim=True) / 127
    assert ((file.tensors["a.weight"] - tensors["a.weight"]).abs() <= step * 0.501).all()
    for name in ("norm.weight", "d2t", "t2d"):
        assert torch.equal(file.tensors[name], tensors[name])


def test_what_is_narrow_stays_as_it_is_when_it_is_narrowed_again() -> None:
    once = widened(narrowed({"w": torch.randn(5, 8)}))
    assert torch.allclose(widened(narrowed(once))["w"], once["w"], atol=1e-6)


def test_pytorchs_own_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"0.0.linear.weight": torch.ones(2, 2)}, tmp_path / "medusa_lm_head.pt")
    assert torch.equal(read_head(tmp_path).tensors["0.0.linear.weight"], torch.ones(2, 2))


@pytest.mark.parametrize(
    ("config", "weights", "fault"),
    [
        (None, b"", "config.json"),
        ("{}", None, "it has no *.safetensors, *.pt or *.bin file"),
        ("{}", b"nonsense", "holds no drafter"),
        ("[]", b"", "holds no drafter"),
        ("{", b"", "holds no drafter"),
    ],
)
def test_a_damaged_folder_is_refused_by_name(
    tmp_path: Path, config: str | None, weights: bytes | None, fault: str
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    if weights is not None:
        (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(HeadError, match=r"holds no drafter") as error:
        read_head(tmp_path)
    assert str(tmp_path) in str(error.value) and fault in str(error.value)


def test_a_number_that_is_not_said_is_asked_for(tmp_path: Path) -> None:
    write_head(tmp_path, {"a": 3, "b": "3"}, {"x": torch.zeros(1)})
    file = read_head(tmp_path)
    assert file.number("a") == 3 and file.number("c", 5) == 5
    with pytest.raises(HeadError, match="says no b"):
        file.number("b")

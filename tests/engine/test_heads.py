"""Heads found and joined to a served model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmserve.engine.engine import Engine
from mmserve.engine.heads import load_head
from mmserve.engine.model_runner import ModelRunner
from mmserve.spec.drafter import Context, Landed, Wanted
from mmserve.spec.eagle import EagleConfig, EagleHead
from mmserve.spec.head_files import HeadError, narrowed, write_head
from mmserve.spec.medusa import MedusaHeads
from tests.engine.tiny import HIDDEN, tiny_config, tiny_model

KNOWN = [5, 9, 40, 7, 8]


@pytest.fixture(scope="module", params=["float32", "int8"])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    return Engine(tiny_config(dtype=request.param), tiny_model()).runner


def made(folder: Path, method: str) -> Path:
    torch.manual_seed(0)
    if method == "medusa":
        write_head(folder, {"medusa_num_heads": 3}, MedusaHeads(HIDDEN, 3, 1).saved())
        return folder
    config = EagleConfig(HIDDEN, 80, 4, 2, 24, 1e4, 1e-5, (-1,), True, 50)
    tensors = {**EagleHead(config).state_dict(), "d2t": torch.arange(50) * 2}
    write_head(folder, config.as_json(), narrowed(tensors))
    return folder


@pytest.mark.parametrize("method", ["eagle", "medusa"])
@pytest.mark.parametrize("most", [0, 6])
def test_a_head_in_a_folder_drafts_tokens_of_the_model(
    tmp_path: Path, runner: ModelRunner, method: str, most: int
) -> None:
    drafter = load_head(method, str(made(tmp_path, method)), runner, "tiny", most)
    assert drafter.name == method and drafter.taps == (-1,)
    context = Context("a", KNOWN, 1)
    drafter.landed(context, Landed(None, (), (), 0, torch.randn(4, HIDDEN)))
    (draft,) = drafter.propose([Wanted(context, 3)])
    assert draft is not None and len(draft) == (most or 3)
    if method == "eagle":
        assert all(token % 3 == 0 and token < 150 for token in draft.read().tokens)


def test_a_shipped_head_is_found_beside_the_model(
    tmp_path: Path, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmserve.engine.heads.MODELS", tmp_path)
    with pytest.raises(HeadError, match="no eagle head comes with tiny"):
        load_head("eagle", None, runner, "tiny")
    made(tmp_path / "tiny" / "drafter", "eagle")
    assert load_head("eagle", None, runner, "tiny").name == "eagle"

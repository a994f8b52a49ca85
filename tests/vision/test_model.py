"""The shipped vision weights: they load whole, give the trained model's numbers, and keep apart."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mmserve.model.spec import ModelSpec, load_spec, read_vision
from mmserve.model.supported import native_json
from mmserve.vision.crops import Crops
from mmserve.vision.model import VisionModel
from tests.vision.images import noise, smooth


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return load_spec("smolvision-135m")


@pytest.fixture(scope="module")
def tensors(spec: ModelSpec) -> dict[str, Tensor]:
    return {k: v for file in spec.vision_files for k, v in load_file(file).items()}


@pytest.fixture(scope="module")
def model(spec: ModelSpec, tensors: dict[str, Tensor]) -> VisionModel:
    model = VisionModel(spec.vision).eval()
    model.load_weights(tensors)
    return model


def pixels(*images: object) -> Tensor:
    return torch.stack([torch.tensor(np.asarray(i)).permute(2, 0, 1) for i in images])


def test_visual_tokens_are_those_of_the_training_code(model: VisionModel) -> None:
    tokens = model.encode(pixels(smooth(224, 224)))
    assert tokens.shape == (1, 64, 576) and tokens.dtype == torch.float32
    trained = torch.tensor(  # of `Learner.see` with these weights, float32, CPU
        [
            [-0.515398, -1.083935, 0.019204],
            [-0.975530, 0.146153, 0.565986],
            [-0.716924, -0.205468, 0.652827],
            [-0.565550, -0.693266, -0.397316],
        ]
    )
    torch.testing.assert_close(tokens[0, ::16, :3], trained, rtol=0, atol=1e-4)
    assert tokens.norm().item() == pytest.approx(214.9289, abs=1e-2)


def test_an_image_does_not_depend_on_its_batch_mates(model: VisionModel) -> None:
    batch = pixels(noise(224, 224), smooth(224, 224), noise(224, 224, 1))
    together = model.encode(batch)
    for i in (2, 0, 1):
        assert torch.equal(model.encode(batch[i : i + 1])[0], together[i])
    assert torch.equal(model.encode(batch.flip(0)).flip(0), together)


def test_a_detail_takes_as_many_tokens_as_the_model_says_and_no_more_than_allowed(
    spec: ModelSpec,
) -> None:
    vision = spec.vision
    assert vision.tokens_of() == {"auto": 64, "low": 16, "high": 64, "original": 64}
    assert vision.tokens_of(63) == {"auto": 32, "low": 16, "high": 32, "original": 32}
    assert vision.tokens_of(31) == dict.fromkeys(vision.tokens_of(), 16)
    assert vision.tokens_of(9) == dict.fromkeys(vision.tokens_of(), 8)
    with pytest.raises(ValueError, match="take 8, 16, 32, 64 tokens, not at most 7"):
        vision.tokens_of(7)
    with pytest.raises(ValueError, match="low has 12"):
        replace(vision, details={"low": 12})


def test_a_model_without_nested_latents_has_one_number(spec: ModelSpec) -> None:
    plain = replace(spec.vision, compressor=replace(spec.vision.compressor, nested=()), details={})
    assert set(plain.tokens_of().values()) == {plain.num_tokens}
    with pytest.raises(ValueError, match="not at most 16"):
        plain.tokens_of(16)


def test_a_missing_or_foreign_tensor_is_refused(
    spec: ModelSpec, tensors: dict[str, Tensor]
) -> None:
    fresh = VisionModel(spec.vision)
    name = next(iter(tensors))
    with pytest.raises(RuntimeError):
        fresh.load_weights({k: v for k, v in tensors.items() if k != name})
    with pytest.raises(RuntimeError):
        fresh.load_weights({**tensors, "visual.stray": tensors[name]})


def test_crops_are_declared_beside_the_details_and_take_all_latents(spec: ModelSpec) -> None:
    path = native_json("smolvision-135m")
    assert path is not None and spec.vision.crops is None
    data = json.loads(path.read_text("utf-8"))["vision"] | {"crops": {"above": 448, "most": 4}}
    vision = read_vision(data)
    assert vision.crops == vision.crops_within(320) == Crops(448, 4)
    assert vision.crops_within(319) == Crops(448, 3) and vision.crops_within(128) is None
    with pytest.raises(ValueError, match="crops take all latents"):
        replace(vision, details={"high": 16})

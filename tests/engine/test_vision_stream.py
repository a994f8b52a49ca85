"""A second stream gives what the first would have; a tower as one launch what it gives alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tests.kernels.interpreter  # noqa: F401
from mmserve.engine.feature_cache import FeatureCache
from mmserve.engine.vision_stream import CapturedTower, VisionStream
from mmserve.model.adapter import Features

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="a CPU has no streams")


class Tower(nn.Module):
    """uint8 [1, 3, 8, 8] -> [1, 4, 48], by a product that takes a while."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(192, 192, generator=generator), False)
        self.wait = nn.Parameter(torch.randn(2048, 2048, generator=generator), False)

    def encode(self, pixels: Tensor) -> Tensor:
        for _ in range(30):
            self.wait @ self.wait
        return (pixels.flatten(1).float() @ self.weight).view(1, 4, 48)


def images(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    shape = (count, 1, 3, 8, 8)
    return list(torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8))


@torch.inference_mode()
def test_images_started_one_after_the_other_are_each_seen_as_if_alone() -> None:
    model = Tower().to(DEVICE)
    stream, cache = VisionStream(DEVICE), FeatureCache(1 << 20)
    tower = CapturedTower(model, DEVICE, torch.float32)
    for number, pixels in enumerate(images(6)):
        cache.put(bytes([number]), *stream.start(lambda p=pixels: Features(tower(p))))  # type: ignore[misc]
    for number, pixels in enumerate(images(6)):
        alone = model.encode(pixels.to(DEVICE))[0]
        torch.testing.assert_close(cache.get(bytes([number])).embeds, alone, rtol=1e-4, atol=1e-2)
        assert cache.is_ready(bytes([number])) or DEVICE.type == "cuda"
    seen = [cache.get(bytes([number])).embeds for number in range(6)]
    assert len({tokens.sum().item() for tokens in seen}) == 6


@pytest.mark.gpu
@on_gpu
@torch.inference_mode()
def test_the_host_does_not_wait_and_an_image_is_not_ready_before_it_is_seen() -> None:
    model, stream, cache = Tower().to(DEVICE), VisionStream(DEVICE), FeatureCache(1 << 20)
    tower = CapturedTower(model, DEVICE, torch.float32)
    first, *others = images(20)
    stream.start(lambda: Features(tower(first)))
    torch.cuda.synchronize()
    for number, pixels in enumerate(others):
        cache.put(bytes([number]), *stream.start(lambda p=pixels: Features(tower(p))))  # type: ignore[misc]
    assert not cache.is_ready(bytes([18]))
    torch.cuda.synchronize()
    assert cache.is_ready(bytes([18]))


class Awkward(Tower):
    """Reads back from the device, which no graph can."""

    def encode(self, pixels: Tensor) -> Tensor:
        return super().encode(pixels) + 0 * float(pixels.sum())


@pytest.mark.gpu
@on_gpu
@torch.inference_mode()
def test_a_tower_that_cannot_be_captured_is_launched_kernel_by_kernel() -> None:
    model = Awkward().to(DEVICE)
    tower = CapturedTower(model, DEVICE, torch.float32)
    for pixels in images(3):
        alone = model.encode(pixels.to(DEVICE))[0]
        torch.testing.assert_close(tower(pixels), alone, rtol=1e-4, atol=1e-2)
    torch.rand(1, device=DEVICE)  # which a failed capture forbids, until another has ended

"""The encoder: both kinds of tower, and batch norm folded without a change of result."""

from __future__ import annotations

import timm
import torch
from torch import nn

from mmserve.vision.encoder import BEHIND_FEATURES, EncoderConfig, VisionEncoder, fold_batch_norm

VIT = {"layers": 3, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 32}
TRUNK = {"timm_model_name": "tf_efficientnet_lite0", "timm_pool": "", "timm_proj": "none"}


def seeded_trunk() -> nn.Module:
    """A timm trunk whose batch norms are far from the identity."""
    torch.manual_seed(1)
    trunk: nn.Module = timm.create_model(TRUNK["timm_model_name"], num_classes=0).eval()
    for module in trunk.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            module.running_mean.uniform_(-0.5, 0.5)
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return trunk


@torch.no_grad()
def test_a_trunk_is_read_at_the_strides_asked_for() -> None:
    encoder = VisionEncoder(EncoderConfig(TRUNK, (2, 3, 4), fold_batch_norm=True)).eval()
    features = encoder(torch.rand(2, 3, 64, 64))
    assert [tuple(f.shape) for f in features] == [(2, 40, 8, 8), (2, 112, 4, 4), (2, 320, 2, 2)]


@torch.no_grad()
def test_open_clips_own_vit_is_read_at_the_blocks_asked_for() -> None:
    torch.manual_seed(2)
    encoder = VisionEncoder(EncoderConfig(VIT, (0, 1))).eval()
    pixels = torch.rand(2, 3, 32, 32)
    first, second = encoder(pixels)
    assert first.shape == second.shape == (2, 32, 4, 4)
    tokens = encoder.trunk._embeds(pixels)
    for feature, block in zip((first, second), encoder.trunk.transformer.resblocks, strict=True):
        tokens = block(tokens)
        patches = tokens[:, 1:].transpose(1, 2).view(2, 32, 4, 4)
        torch.testing.assert_close(feature, patches)


@torch.no_grad()
def test_what_lies_behind_the_last_feature_is_not_kept() -> None:
    encoder = VisionEncoder(EncoderConfig(VIT, (0, 1)))
    assert len(encoder.trunk.transformer.resblocks) == 2
    trunk = VisionEncoder(EncoderConfig(TRUNK, (2, 3)))
    assert len(trunk.trunk.blocks) == 5
    assert all(name.split(".")[0] not in BEHIND_FEATURES for name in trunk.trunk.state_dict())


@torch.no_grad()
def test_folding_batch_norm_keeps_the_features() -> None:
    trunk = seeded_trunk()
    pixels = torch.rand(1, 3, 64, 64)
    before = trunk.forward_intermediates(pixels, intermediates_only=True)  # type: ignore[operator]
    fold_batch_norm(trunk)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in trunk.modules())
    after = trunk.forward_intermediates(pixels, intermediates_only=True)  # type: ignore[operator]
    for x, y in zip(before, after, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_folding_keeps_a_bias_that_the_convolution_had() -> None:
    layers = nn.Sequential(nn.Conv2d(3, 4, 1, bias=True), nn.BatchNorm2d(4)).eval()
    nn.init.normal_(layers[0].bias)  # type: ignore[arg-type]
    nn.init.normal_(layers[1].weight)  # type: ignore[arg-type]
    pixels = torch.rand(1, 3, 5, 5)
    before = layers(pixels)
    fold_batch_norm(layers)
    torch.testing.assert_close(layers(pixels), before)

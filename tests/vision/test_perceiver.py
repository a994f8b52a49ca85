"""The compressor against a second statement of it in PyTorch's own modules."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from mmserve.vision.perceiver import (
    CompressorConfig,
    CrossBlock,
    PerceiverCompressor,
    Source,
    cell_centres,
    latent_places,
    local_bias,
    spread,
)

CONFIG = CompressorConfig(
    image_size=32,
    levels={8: (Source(0, 3, unshuffle=2), Source(1, 5)), 16: (Source(2, 7),)},
    width=24,
    heads=4,
    layers=2,
    latent_grid=(2, 3),
    local_sigmas=(0.1, 0.3),
    hidden_size=10,
)


def features(images: int) -> list[Tensor]:
    torch.manual_seed(3)
    return [
        torch.randn(images, 3, 8, 8),
        torch.randn(images, 5, 4, 4),
        torch.randn(images, 7, 2, 2),
    ]


def seeded() -> PerceiverCompressor:
    torch.manual_seed(4)
    module = PerceiverCompressor(CONFIG).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def plain_block(block: CrossBlock, x: Tensor, tokens: Tensor, bias: Tensor) -> Tensor:
    attention = nn.MultiheadAttention(CONFIG.width, CONFIG.heads, batch_first=True).eval()
    attention.load_state_dict(block.attn.state_dict())
    y = block.ln_1(x)
    keys = torch.cat([block.ln_kv(tokens), y], 1)
    mask = bias.expand(len(x), -1, -1, -1).flatten(0, 1)
    x = x + attention(y, keys, keys, attn_mask=mask, need_weights=False)[0]
    out: Tensor = x + block.mlp(block.ln_2(x))
    return out


@torch.no_grad()
@pytest.mark.parametrize("images", [1, 3])
def test_it_equals_pytorchs_own_attention(images: int) -> None:
    module, maps = seeded(), features(images)
    tokens = module.tokens(maps) + module.pos
    x = module.latents.expand(images, -1, -1)
    for block in module.blocks:
        assert isinstance(block, CrossBlock)
        x = plain_block(block, x, tokens, module.bias)
    torch.testing.assert_close(module(maps), module.proj(module.ln(x)), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_an_image_becomes_the_fixed_number_of_latents() -> None:
    out = seeded()(features(2))
    assert out.shape == (2, CONFIG.num_latents, CONFIG.hidden_size)


@torch.no_grad()
def test_tokens_join_the_maps_of_a_level_and_list_levels_one_after_another() -> None:
    module, maps = seeded(), features(1)
    tokens = module.tokens(maps)
    assert tokens.shape == (1, 4 * 4 + 2 * 2, CONFIG.width)
    # Token (row 1, column 2) of the fine level: its own 2 x 2 block of map 0, then map 1 there.
    block = maps[0][0, :, 2:4, 4:6].flatten()
    joined = torch.cat([block, maps[1][0, :, 1, 2]])
    norm, enter = module.get_submodule("ln8"), module.get_submodule("in8")
    torch.testing.assert_close(tokens[0, 1 * 4 + 2], enter(norm(joined)))


def test_the_bias_is_a_gaussian_around_the_latents_own_place() -> None:
    bias = local_bias(CONFIG)
    assert bias.shape == (1, 4, 6, 20 + 6)
    latent, token = (1 / 6, 1 / 4), (0.875, 0.625)  # (x, y) of latent 0, of fine token row 2, col 3
    distance = math.dist(latent, token)
    for head, sigma in enumerate(CONFIG.local_sigmas):
        value = bias[0, head, 0, 2 * 4 + 3].item()
        assert value == pytest.approx(-(distance**2) / (2 * sigma**2), rel=1e-4)
    assert bias[0, 2:].abs().max() == 0 and bias[..., 20:].abs().max() == 0


def test_cell_centres_run_row_by_row() -> None:
    assert cell_centres(2, 2).tolist() == [[0.25, 0.25], [0.75, 0.25], [0.25, 0.75], [0.75, 0.75]]


def test_the_first_of_nested_latents_lie_all_over_the_image() -> None:
    order = spread(8, 8)
    assert sorted(order) == list(range(64))
    for count, side in ((4, 2), (16, 4), (64, 8)):  # one in each cell of a coarser grid
        places = {(cell // 8 * side // 8, cell % 8 * side // 8) for cell in order[:count]}
        assert len(places) == count
    for count, side in ((8, 4), (32, 8)):  # chequered: each row and column of cells has as many
        rows = [cell // 8 * side // 8 for cell in order[:count]]
        columns = [cell % 8 * side // 8 for cell in order[:count]]
        assert {rows.count(i) for i in range(side)} == {side // 2}
        assert {columns.count(i) for i in range(side)} == {side // 2}


def test_nested_latents_keep_the_places_of_the_grid() -> None:
    nested = replace(CONFIG, latent_grid=(4, 4), nested=(4, 16))
    plain = replace(CONFIG, latent_grid=(4, 4))
    assert sorted(latent_places(nested).tolist()) == sorted(latent_places(plain).tolist())
    assert latent_places(nested).tolist() != latent_places(plain).tolist()


@pytest.mark.parametrize("nested", [(2, 5), (4, 2, 6), (0, 6), (6, 8)])
def test_nested_sizes_grow_up_to_all_latents(nested: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="do not grow up to all 6"):
        replace(CONFIG, nested=nested)

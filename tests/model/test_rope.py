"""Rotary angles by regime, against transformers' own modules asked for one sequence at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from mmserve.kernels.reference import rope_table
from mmserve.model import rope
from mmserve.regimes import Growth, Regimes
from tests.model.family_text import BODY, TEXT, llama
from tests.model.family_vision import VISION

LENGTHS = (5, 64, 65, 100, 200)
YARN = {"rope_type": "yarn", "factor": 4.0}
LONG = {"rope_type": "longrope", "factor": 4.0, "long_factor": [1.0 + 0.5 * i for i in range(8)]}


def longrope_llama() -> Any:
    short = {"short_factor": [1.0] * 8, "original_max_position_embeddings": 64}
    return llama(rope={**LONG, **short}, trained=256)


RECIPES = {
    **{name: TEXT[name] for name in ("llama_gqa", "gemma3_text", "phi", "phi3")},
    **{f"llama_{kind}": TEXT[f"llama_{kind}"] for kind in ("linear", "dynamic", "yarn", "llama3")},
    **{name: VISION[name] for name in ("qwen2_5_vl", "qwen3_vl")},
    "llama_longrope": longrope_llama,
}


def decoder_of(config: Any) -> Any:
    kind = hf.AutoModelForCausalLM
    if hasattr(config, "vision_config"):
        kind = hf.AutoModelForImageTextToText
    return kind.from_config(config).get_decoder()


def layer_types(config: Any) -> tuple[tuple[str, ...], ...]:
    """The further arguments of each kind of call."""
    nested = isinstance(next(iter(config.rope_parameters.values())), dict)
    return tuple((name,) for name in config.rope_parameters) if nested else ((),)


def positions(config: Any, length: int) -> Tensor:
    """[1, length], or [3, 1, length] with axes of their own."""
    where = torch.arange(length)
    if "mrope_section" not in config.rope_parameters:
        return where[None]
    return torch.stack((where, where // 2, where // 3))[:, None]


def alone(config: Any, where: Tensor, more: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """transformers' angles of one sequence in one call, by a module that has seen no other."""
    module = decoder_of(config).rotary_emb
    cos, sin = module(torch.zeros(1), where, *more)
    return cos, sin


def close(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> bool:
    return all(float((a - b).abs().max()) < 2e-5 for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("name", RECIPES)
def test_a_mixed_batch_has_the_angles_of_each_sequence_alone(name: str) -> None:
    whole = RECIPES[name]().config
    config = whole.get_text_config()
    decoder = decoder_of(whole)
    module, regimes = rope.install(decoder, config)
    assert module is decoder.rotary_emb is not None
    each = [positions(config, length) for length in LENGTHS]
    order = torch.randperm(sum(LENGTHS), generator=torch.Generator().manual_seed(0))
    of_rows = torch.cat([torch.full((n,), regimes.of(n)) for n in LENGTHS])
    module.regimes = of_rows[order] if of_rows.any() else None
    for more in layer_types(config):
        parts = [alone(whole, where, more) for where in each]
        wanted = tuple(torch.cat(part, 1)[:, order] for part in zip(*parts, strict=True))
        got = module(torch.zeros(1), torch.cat(each, -1)[..., order], *more)
        assert close(got, wanted)


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_call_was_asked_does_not_change_the_next(name: str) -> None:
    whole = RECIPES[name]().config
    config = whole.get_text_config()
    module, _ = rope.install(decoder_of(whole), config)
    assert module is not None
    more = layer_types(config)[0]
    before = module(torch.zeros(1), positions(config, 20), *more)
    module(torch.zeros(1), positions(config, 250), *more)
    after = module(torch.zeros(1), positions(config, 20), *more)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_models_declare_what_transformers_does_with_them() -> None:
    declared = {name: rope.declared(r().config.get_text_config()) for name, r in RECIPES.items()}
    growing = {name for name, regimes in declared.items() if regimes.trained is not None}
    assert growing == {"llama_dynamic", "llama_longrope", "phi3"}
    assert declared["phi3"] == Regimes(64)
    assert declared["llama_longrope"] == Regimes(64, whole=False)  # keeps what short angles made
    assert declared["llama_dynamic"] == Regimes(64, Growth.EXACT, whole=False)


# -- on demand -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama_gqa", "phi", "qwen2_5_vl", "qwen3_vl", "gemma3_text"])
@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_rows_have_the_angles_of_a_config_that_declares_the_scaling(
    name: str, kind: str
) -> None:
    whole = RECIPES[name]().config
    config = whole.get_text_config()
    if name == "gemma3_text":
        config.rope_parameters["full_attention"] = {"rope_type": "default", "rope_theta": 1e6}
    scaling = rope.asked({"type": kind, "factor": 4.0}, 64)
    plain = decoder_of(whole).rotary_emb
    module, regimes = rope.install(decoder_of(whole), config, scaling)
    assert module is not None and regimes == Regimes(64)
    where = positions(config, 250)
    module.regimes = (torch.arange(250) % 3 == 0).long()
    for more in layer_types(config):
        unscaled = plain(torch.zeros(1), where, *more)
        declaring = type(plain)(rope.scaled_config(config, scaling))
        scaled = declaring(torch.zeros(1), where, *more)
        got = module(torch.zeros(1), where, *more)
        assert torch.equal(scaled[0], unscaled[0]) == (more == ("sliding_attention",))
        for part, a, b in zip(got, scaled, unscaled, strict=True):
            assert torch.equal(part[:, ::3], a[:, ::3])
            assert torch.equal(part[:, 1::3], b[:, 1::3])


def test_longrope_on_demand_begins_with_the_long_factors() -> None:
    config = TEXT["llama_gqa"]().config
    module, _ = rope.install(decoder_of(config), config, rope.asked(LONG, 64))
    assert module is not None
    where = torch.arange(100)[None]
    module.regimes = torch.ones(100, dtype=torch.long)
    assert close(module(torch.zeros(1), where), alone(longrope_llama().config, where, ()))


def test_sections_of_several_axes_go_with_dynamic_scaling_on_demand() -> None:
    whole = VISION["qwen2_5_vl"]().config
    config = whole.get_text_config()
    scaling = rope.asked({"rope_type": "dynamic", "factor": 2.0}, 64)
    module, _ = rope.install(decoder_of(whole), config, scaling)
    assert module is not None
    where = positions(config, 128)  # a call of this length has the base of the first doubling
    module.regimes = torch.ones(128, dtype=torch.long)
    theirs = decoder_of(whole).rotary_emb
    wanted = type(theirs)(rope.scaled_config(config, scaling))(torch.zeros(1), where)
    assert close(module(torch.zeros(1), where), wanted)
    assert not close(wanted, theirs(torch.zeros(1), where))


def test_dynamic_on_demand_has_a_base_for_each_doubling() -> None:
    config = TEXT["llama_gqa"]().config
    scaling = rope.asked({"rope_type": "dynamic", "factor": 7.0}, 64)
    module, regimes = rope.install(decoder_of(config), config, scaling)
    assert module is not None
    assert [regimes.of(n) for n in (64, 65, 128, 129, 256, 257, 448)] == [0, 1, 1, 2, 2, 3, 3]
    dynamic = TEXT["llama_dynamic"]().config  # trained for 64, a factor of 7
    for regime in (1, 2, 3):
        longest = 64 << regime
        where = torch.arange(longest)[None]
        module.regimes = torch.full((longest,), regime)
        assert close(module(torch.zeros(1), where), alone(dynamic, where, ()))


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"factor": 4.0}, "rope scaling None is none of"),
        ({"rope_type": "mrope", "factor": 4.0}, "'mrope' is none of"),
        ({"rope_type": "yarn"}, "a factor above 1, not None"),
        ({"rope_type": "yarn", "factor": 0.5}, "a factor above 1, not 0.5"),
        ({**YARN, "original_max_position_embeddings": 9999}, "1 to 4096 tokens, not 9999"),
        ({"rope_type": "longrope", "factor": 4.0}, "longrope rope scaling needs long_factor"),
        ({"rope_type": "llama3", "factor": 4.0}, "llama3 rope scaling needs"),
        ({**LONG, "long_factor": [1.0, 2.0]}, "does not fit the model"),
    ],
)
def test_scaling_that_cannot_be_is_refused_in_a_sentence(wanted: Any, words: str) -> None:
    config = llama().config
    with pytest.raises(ValueError, match=words):
        rope.install(decoder_of(config), config, rope.asked(wanted, 4096))


def test_a_checkpoint_that_declares_its_scaling_gets_no_other() -> None:
    config = TEXT["llama_yarn"]().config
    with pytest.raises(ValueError, match=r"declares rope scaling itself \(yarn\)"):
        rope.install(decoder_of(config), config, rope.asked(YARN, 256))


def test_a_model_reaches_as_far_as_its_factor_says() -> None:
    assert rope.reach(rope.asked(YARN, 4096)) == 16384
    assert rope.reach(rope.asked({**YARN, "original_max_position_embeddings": 1024}, 4096)) == 4096


# -- tables of the native composition --------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "yarn", "dynamic"])
def test_a_table_of_all_regimes_holds_what_their_modules_say(kind: str) -> None:
    config = hf.LlamaConfig(**BODY, vocab_size=8)
    scaling = rope.asked({"rope_type": kind, "factor": 4.0}, 64)
    module, _ = rope.install(decoder_of(config), config, scaling)
    assert module is not None
    plain = rope_table(256, 16, 10000.0)
    table, blocks = rope.stack_tables(plain, module)
    assert torch.equal(table[:256], plain) and blocks[0] == rope.Block()
    where = torch.arange(256)[None]
    for regime, block in enumerate(blocks):
        module.regimes = torch.full((256,), regime)
        wanted = module(torch.zeros(1), where)
        rotating = table[block.rotating : block.rotating + 256].transpose(0, 1)
        assert close(tuple(rotating), tuple(part[0, :, :8] for part in wanted))
        turning = table[block.turning : block.turning + 256]
        assert float(turning.square().sum(1).sub(1).abs().max()) < 1e-5, "turning must not scale"

"""Rotary angles for flat batches: many sequences of many lengths in one call.

Owns what a regime (`mmserve.regimes`) means in angles, what a checkpoint's config declares about
it, and scaling on demand (`--rope-scaling`). The angles themselves are transformers': a module of
the model's own class for each regime, so that M-RoPE's sections and layers of several types are
what they are there. transformers' modules choose their frequencies by the largest position of a
whole call and remember them; ours are each asked once, for one length, and then held still.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mmserve.regimes import Growth, Regimes

KINDS = ("linear", "dynamic", "yarn", "longrope", "llama3")  # that can be asked for

# Whose `prepare_inputs_for_generation` computes all keys again where the long factors begin. All
# other models of transformers keep the keys that the short ones made.
_RECOMPUTES = ("phi3", "phimoe", "phi4_multimodal")

_FULL = "full_attention"  # the layer type whose reach grows with the sequence


class Rope(nn.Module):
    """Stands where a decoder's `rotary_emb` stood.

    `regimes` [T] int64, to be set before every call: of its rows; None: all of regime 0.
    """

    regimes: Tensor | None

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """`modules`: by regime."""
        super().__init__()
        self.by_regime = nn.ModuleList(modules)
        self.regimes = None

    def forward(self, x: Tensor, position_ids: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        """position_ids [1, T] or [axes, 1, T]; `more`: the layer type, where angles differ by it.

        cos, sin [1, T, D] in x's dtype.
        """
        first, *others = self.by_regime
        cos, sin = first(x, position_ids, *more)
        if self.regimes is None:
            return cos, sin
        for regime, module in enumerate(others, 1):
            mine = (self.regimes == regime)[:, None]
            scaled = module(x, position_ids, *more)
            cos, sin = torch.where(mine, scaled[0], cos), torch.where(mine, scaled[1], sin)
        return cos, sin


class DynamicRope(Rope):
    """Where each length beyond the trained one is a regime (dynamic NTK, as declared).

    A table of all of them, so that rows of many lengths cost one look-up.
    """

    inverse: Tensor  # [regimes, D / 2] float32

    def __init__(self, module: nn.Module, config: Any) -> None:
        super().__init__([module])
        trained = int(config.max_position_embeddings)
        longest = int(trained * float(config.rope_parameters["factor"]))
        lengths = torch.arange(trained + 1, longest + 1)[:, None]
        beyond, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, None, seq_len=lengths)
        within: Any = module.inv_freq
        self.register_buffer("inverse", torch.cat((within[None], beyond.to(within))), False)

    def forward(self, x: Tensor, position_ids: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        if self.regimes is None:
            return super().forward(x, position_ids, *more)
        half = position_ids[..., None].float() * self.inverse[self.regimes]
        angles = torch.cat((half, half), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Block(NamedTuple):
    """Where a regime's rows begin in a table of all regimes.

    `rotating`: the row of position 0 for queries and keys; `turning`: for queries that are turned
    on to an image, which have been rotated, and scaled, before.
    """

    rotating: int = 0
    turning: int = 0


def stack_tables(plain: Tensor, rope: Rope) -> tuple[Tensor, tuple[Block, ...]]:
    """A table (`rope_table`) for all regimes, one below the other, and where each begins.

    `plain` [positions, 2, D / 2]: regime 0's.
    """
    length = len(plain)
    tables, blocks = [plain], [Block()]
    index = torch.arange(length, dtype=torch.float64)[:, None]
    for module in rope.by_regime[1:]:
        found: Any = module
        angle = index * found.inv_freq.cpu().double()
        turning = torch.stack((angle.cos(), angle.sin()), 1)
        at = len(tables) * length
        tables.append(turning.float())
        if found.attention_scaling == 1:
            blocks.append(Block(at, at))
        else:
            tables.append((turning * found.attention_scaling).float())
            blocks.append(Block(at + length, at))
    return torch.cat(tables), tuple(blocks)


def install(
    decoder: Any, config: Any, scaling: Mapping[str, Any] | None = None
) -> tuple[Rope | None, Regimes]:
    """Put a `Rope` in the place of a decoder's rotary module; None where it has none.

    `config`: the text model's; `scaling`: on demand, as `asked` makes it. Raises ValueError for
    scaling that the model cannot have.
    """
    old: Any = getattr(decoder, "rotary_emb", None)
    if getattr(old, "rope_type", None) is None:
        if scaling is not None:
            raise ValueError(f"{config.model_type} has no rotary embedding that could be scaled")
        return None, Regimes()
    rope, regimes = _build(type(old), config, scaling)
    buffer = next(iter(old.buffers()), None)
    decoder.rotary_emb = rope if buffer is None else rope.to(buffer.device)
    return rope, regimes


def _build(kind: Any, config: Any, scaling: Mapping[str, Any] | None) -> tuple[Rope, Regimes]:
    if scaling is not None:
        modules, regimes = _on_demand(kind, config, scaling)
        return Rope([_still(kind(config)), *modules]), regimes
    regimes = declared(config)
    if regimes.trained is None:
        return Rope([_still(kind(config))]), regimes
    if regimes.growth is not Growth.EXACT:
        lengths = (regimes.trained, regimes.trained + 1)
        return Rope([_still(kind(config), length) for length in lengths]), regimes
    if None not in _by_layer_type(config) or "mrope_section" in config.rope_parameters:
        raise ValueError(f"{config.model_type} with dynamic rope scaling is not supported")
    return DynamicRope(_still(kind(config)), config), regimes


def declared(config: Any) -> Regimes:
    """What transformers does with this config, whose sequences it generates one at a time."""
    for rope in _by_layer_type(config).values():
        if rope.get("rope_type") == "longrope":
            recomputes = config.model_type in _RECOMPUTES
            return Regimes(int(rope["original_max_position_embeddings"]), whole=recomputes)
        if rope.get("rope_type") == "dynamic":
            return Regimes(int(config.max_position_embeddings), Growth.EXACT, whole=False)
    return Regimes()


def _by_layer_type(config: Any) -> dict[str | None, dict[str, Any]]:
    """Rotary parameters; under None where all layers have the same."""
    rope = getattr(config, "rope_parameters", None) or {}
    types = {name: part for name, part in rope.items() if isinstance(part, dict)}
    return types or {None: rope}


def _still(module: Any, length: int | None = None) -> nn.Module:
    """A rotary module with the frequencies of sequences of this length, for good."""
    types: Any = module.rope_type
    if length is not None:
        axes = (3,) if "mrope_section" in module.config.rope_parameters else ()
        position = torch.full((*axes, 1, 1), length - 1)
        for name in types if isinstance(types, dict) else (None,):
            module(torch.zeros(1), position, *(() if name is None else (name,)))
    # transformers looks at the type before each call, to see whether to choose frequencies anew.
    module.rope_type = dict.fromkeys(types, "still") if isinstance(types, dict) else "still"
    found: nn.Module = module
    return found


# -- on demand -------------------------------------------------------------------------------------


def asked(wanted: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """Scaling on demand in transformers' words, complete. `longest`: positions without it.

    Nothing is scaled within `original_max_position_embeddings`. Raises ValueError.
    """
    made = {name: value for name, value in wanted.items() if name != "type"}
    kind = made.setdefault("rope_type", wanted.get("type"))
    if kind not in KINDS:
        raise ValueError(f"rope scaling {kind!r} is none of {', '.join(KINDS)}")
    factor = made.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 1:
        raise ValueError(f"rope scaling needs a factor above 1, not {factor!r}")
    trained = made.setdefault("original_max_position_embeddings", longest)
    if not isinstance(trained, int) or not 0 < trained <= longest:
        raise ValueError(f"rope scaling begins behind 1 to {longest} tokens, not {trained!r}")
    if kind == "longrope":
        made.setdefault("short_factor", made.get("long_factor"))  # never used: that is regime 0
    return made


def reach(scaling: Mapping[str, Any]) -> int:
    """Positions that a model serves with scaling on demand."""
    return int(scaling["original_max_position_embeddings"] * scaling["factor"])


def scaled_config(config: Any, scaling: Mapping[str, Any]) -> Any:
    """The config that declares this scaling (`asked`) from the start.

    Of layers of several types, those with full attention are scaled: what others read is never
    further away than their window. Raises ValueError.
    """
    parts = _by_layer_type(config)
    for rope in parts.values():
        kind = rope.get("rope_type", "default")
        if kind != "default":
            raise ValueError(
                f"the checkpoint declares rope scaling itself ({kind}); --rope-scaling is for "
                "models that do not"
            )
    made = copy.deepcopy(config)
    made.max_position_embeddings = scaling["original_max_position_embeddings"]
    if None in parts:
        made.rope_parameters = {**parts[None], **scaling}
    elif _FULL in parts:
        made.rope_parameters = {**config.rope_parameters, _FULL: {**parts[_FULL], **scaling}}
    else:
        raise ValueError(f"{config.model_type} has no full attention to scale")
    return made


def _on_demand(
    kind: Any, config: Any, scaling: Mapping[str, Any]
) -> tuple[list[nn.Module], Regimes]:
    """The rotary modules of regimes 1 and on.

    Dynamic NTK would change with every token, and make all keys new each time; here the base is
    that of the next power of two times the trained length, so keys are made anew at each doubling.
    """
    trained: int = scaling["original_max_position_embeddings"]
    made = scaled_config(config, scaling)
    dynamic = scaling["rope_type"] == "dynamic"
    doublings = math.ceil(math.log2(scaling["factor"])) if dynamic else 1
    try:
        modules = [_still(kind(made), trained << n) for n in range(1, doublings + 1)]
    except KeyError as error:
        raise ValueError(f"{scaling['rope_type']} rope scaling needs {error.args[0]}") from error
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"this rope scaling does not fit the model: {error}") from error
    return modules, Regimes(trained, Growth.DOUBLE if dynamic else Growth.SWITCH)

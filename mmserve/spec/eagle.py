"""EAGLE's head: one decoder layer that guesses a model's next hidden state, and by it the next
token, from a hidden state and the token that was chosen there.

Owns the two public layouts and how they are read. Its attention is whoever's who calls it: training
sees a whole text at once, serving one token at a time. Knows nothing of sequences.

At index i it is given what the model made of token i (`features`) and the embedding of token i + 1,
and what it makes of them stands for what the model makes of token i + 1: the scores of token i + 2.
Published by layout (names as in public checkpoints, `layers.0.` read as `midlayer.`):

* EAGLE-1 and 2: `fc` joins embedding and hidden state, a Llama layer follows, the model's own
  output matrix scores.
* EAGLE-3: `fc` joins the tapped layers' states into one, the layer attends by the embedding beside
  it, each normed, and its output is normed and scored by a matrix over a smaller vocabulary: number
  j of it is the model's token j + d2t[j]. Where `lm_head.weight` is missing, its rows are the
  model's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmserve.spec.drafter import FINAL
from mmserve.spec.head_files import HeadError, HeadFile
from mmserve.spec.target_parts import TargetParts

LAYER = "midlayer."
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


@dataclass(frozen=True)
class EagleConfig:
    """`taps`: as `Drafter.taps`; `draft_vocab`: how many tokens it can guess, None: all; `third`:
    which of the two layouts; `bias`: of fc and of q, k and v."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    eps: float
    taps: tuple[int, ...]
    third: bool
    draft_vocab: int | None = None
    bias: tuple[bool, bool] = (False, False)

    def as_json(self) -> dict[str, Any]:
        """As public checkpoints say it; ours say which layers are tapped, too."""
        return {
            "architectures": ["LlamaForCausalLMEagle3" if self.third else "LlamaForCausalLMEagle"],
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.eps,
            "hidden_act": "silu",
            "num_hidden_layers": 1,
            "draft_vocab_size": self.draft_vocab,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.taps)},
        }


class Attending(NamedTuple):
    """A layer's input, as attention takes it: `residual` [..., hidden], `qkv` [..., H + 2 Hkv, D]:
    queries, keys and values, none of them rotated."""

    residual: Tensor
    qkv: Tensor


class EagleHead(nn.Module):
    """The layer's parts. `ids` [V'] int64: the model's numbers of what it can guess; None: all."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config, c = config, config
        wide = 2 * c.hidden_size
        of_fc = len(c.taps) * c.hidden_size if c.third else wide
        of_layer = wide if c.third else c.hidden_size
        self.fc: Any = nn.Linear(of_fc, c.hidden_size, bias=c.bias[0])
        heads = {"q_proj": c.num_heads, "k_proj": c.num_kv_heads, "v_proj": c.num_kv_heads}
        attention: dict[str, nn.Module] = {
            name: nn.Linear(of_layer, count * c.head_dim, bias=c.bias[1])
            for name, count in heads.items()
        }
        attention["o_proj"] = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        mlp = {
            "gate_proj": nn.Linear(c.hidden_size, c.intermediate_size, bias=False),
            "up_proj": nn.Linear(c.hidden_size, c.intermediate_size, bias=False),
            "down_proj": nn.Linear(c.intermediate_size, c.hidden_size, bias=False),
        }
        norms = ["post_attention_layernorm"]
        if c.third:
            norms += ["input_layernorm", "hidden_norm"]
            self.norm: Any = nn.RMSNorm(c.hidden_size, eps=c.eps)
        self.midlayer: Any = nn.ModuleDict(
            {
                "self_attn": nn.ModuleDict(attention),
                "mlp": nn.ModuleDict(mlp),
                **{name: nn.RMSNorm(c.hidden_size, eps=c.eps) for name in norms},
            }
        )
        self.ids: Tensor | None = None
        self.score: Any = None  # [..., hidden] -> [..., V'], of normed states
        self._qkv: Any = None  # three products as one, where it is served; likewise:
        self._gate_up: Any = None

    def joined(self, features: Tensor) -> Tensor:
        """What the model made of tokens, [..., F] -> [..., hidden], as its own guesses come."""
        joined: Tensor = self.fc(features) if self.config.third else features
        return joined

    def attending(self, hidden: Tensor, embeds: Tensor) -> Attending:
        """hidden, embeds [..., hidden]."""
        layer, c = self.midlayer, self.config
        if c.third:
            residual = hidden
            x = torch.cat((layer.input_layernorm(embeds), layer.hidden_norm(hidden)), -1)
        else:
            x = residual = self.fc(torch.cat((embeds, hidden), -1))
        attention = layer.self_attn
        if self._qkv is not None:
            qkv = self._qkv(x)
        else:
            qkv = torch.cat([attention[name](x) for name in QKV], -1)
        return Attending(residual, qkv.view(*x.shape[:-1], -1, c.head_dim))

    def closed(self, residual: Tensor, attended: Tensor) -> Tensor:
        """attended [..., H, D] -> the guessed state [..., hidden]."""
        layer = self.midlayer
        x: Tensor = residual + layer.self_attn.o_proj(attended.flatten(-2))
        y, mlp = layer.post_attention_layernorm(x), layer.mlp
        if self._gate_up is not None:
            gate, up = self._gate_up(y).chunk(2, -1)
        else:
            gate, up = mlp.gate_proj(y), mlp.up_proj(y)
        guessed: Tensor = x + mlp.down_proj(functional.silu(gate) * up)
        return guessed

    def scores(self, state: Tensor) -> Tensor:
        """[..., hidden] -> [..., V']."""
        out: Tensor = self.score(self.norm(state) if self.config.third else state)
        return out

    def named(self, numbers: Tensor) -> Tensor:
        """Numbers in its own vocabulary as the model's token ids."""
        return numbers if self.ids is None else self.ids[numbers]


class Turn(NamedTuple):
    """By what heads are turned at some positions, halves apart, as Llama does: [..., 1, D] each."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., heads, D]."""
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat((-b, a), -1) * self.sin


def turns(positions: Tensor, config: EagleConfig, dtype: torch.dtype) -> Turn:
    """positions [...] int64."""
    half = config.head_dim // 2
    steps = torch.arange(half, dtype=torch.float64, device=positions.device) / half
    angles = positions[..., None].double() * config.rope_theta**-steps
    whole = torch.cat((angles, angles), -1)[..., None, :]
    return Turn(whole.cos().to(dtype), whole.sin().to(dtype))


def load_eagle(file: HeadFile, parts: TargetParts) -> EagleHead:
    """In evaluation mode, on the model's device. Raises `HeadError` for a head of another model or
    a layout that is not known."""
    tensors = {_renamed(name): tensor for name, tensor in file.tensors.items()}
    config = _config(file, tensors, parts)
    head = EagleHead(config)
    names = set(head.state_dict())
    if missing := sorted(names - set(tensors)):
        raise HeadError(
            f"{file.folder} is no EAGLE head that is known here: it has no {missing[0]}"
        )
    deeper = [n for n in file.tensors if n.startswith("layers.") and not n.startswith("layers.0.")]
    if deeper:
        raise HeadError(f"{file.folder}: heads of one layer are supported, it has more")
    try:
        head.load_state_dict({name: tensors[name].float() for name in names})
    except RuntimeError as error:
        raise HeadError(f"{file.folder}: its tensors do not fit config.json: {error}") from error
    head.to(parts.device, parts.dtype).eval().requires_grad_(False)
    _set_vocabulary(head, tensors, parts)
    _quicken(head, parts)
    return head


def _renamed(name: str) -> str:
    name = name.removeprefix("model.")
    return LAYER + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def _config(file: HeadFile, tensors: Mapping[str, Tensor], parts: TargetParts) -> EagleConfig:
    third = LAYER + "hidden_norm.weight" in tensors
    hidden, heads = int(file.number("hidden_size")), int(file.number("num_attention_heads"))
    if hidden != parts.hidden_size:
        raise HeadError(
            f"{file.folder} is of another model: its hidden size is {hidden}, "
            f"the model's {parts.hidden_size}"
        )
    rope = file.config.get("rope_parameters") or file.config
    known = sum(name == "d2t" for name in tensors)
    return EagleConfig(
        hidden_size=hidden,
        intermediate_size=int(file.number("intermediate_size")),
        num_heads=heads,
        num_kv_heads=int(file.number("num_key_value_heads", heads)),
        head_dim=int(file.number("head_dim", hidden // heads)),
        # Scaled rotations differ little over the few hundred tokens that a head sees.
        rope_theta=float(rope.get("rope_theta") or 10000.0),
        eps=float(file.number("rms_norm_eps", 1e-6)),
        taps=_taps(file, parts.num_layers) if third else (FINAL,),
        third=third,
        draft_vocab=len(tensors["d2t"]) if known else None,
        bias=("fc.bias" in tensors, LAYER + "self_attn.q_proj.bias" in tensors),
    )


def _taps(file: HeadFile, num_layers: int) -> tuple[int, ...]:
    """Where a checkpoint does not say: low, middle and high, as EAGLE-3 was published."""
    said = (file.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    said = said or file.config.get("eagle_aux_hidden_state_layer_ids")
    taps = tuple(said or (1, num_layers // 2 - 1, num_layers - 4))
    if not all(isinstance(tap, int) and FINAL <= tap < num_layers for tap in taps):
        raise HeadError(f"{file.folder} reads layers {list(taps)}, the model has {num_layers}")
    return taps


def _set_vocabulary(head: EagleHead, tensors: Mapping[str, Tensor], parts: TargetParts) -> None:
    own = tensors.get("lm_head.weight") if head.config.third else None
    if "d2t" in tensors:
        further = tensors["d2t"].long()
        head.ids = (further + torch.arange(len(further))).to(parts.device)
        if int(head.ids.max()) >= parts.vocab_size:
            raise HeadError("the head is of another model: it guesses tokens that are not there")
    if own is None and head.ids is None:
        head.score = parts.logits
        return
    rows = own if own is not None else parts.head_rows(head.ids) if head.ids is not None else None
    assert rows is not None
    head.score = parts.linear(rows.to(parts.device, parts.dtype), None)


def _quicken(head: EagleHead, parts: TargetParts) -> None:
    """Its products as few and as fast as the device can."""
    head._qkv = _packed([head.midlayer.self_attn[name] for name in QKV], parts)
    head._gate_up = _packed([head.midlayer.mlp[name] for name in GATE_UP], parts)
    for name in QKV:
        del head.midlayer.self_attn[name]
    for name in GATE_UP:
        del head.midlayer.mlp[name]
    for parent in list(head.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                bias = None if child.bias is None else child.bias.data
                setattr(parent, name, _Product(parts.linear(child.weight.data, bias)))


def _packed(layers: list[Any], parts: TargetParts) -> _Product:
    biases = [layer.bias.data for layer in layers if layer.bias is not None]
    weight = torch.cat([layer.weight.data for layer in layers])
    return _Product(parts.linear(weight, torch.cat(biases) if biases else None))


class _Product(nn.Module):
    def __init__(self, product: Any) -> None:
        super().__init__()
        self._product = product

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._product(x)
        return out

"""Medusa: heads that each guess one of the next tokens, all from one hidden state.

Owns the heads, their public layout and the drafter. Knows nothing of how they are trained. A head
is `num_layers` residual blocks x + silu(W x + b), and the model's own output matrix or one of its
own; head k of a token's final hidden state guesses the token k + 2 behind it, so the last known
token's own successor is the model's to say: what is guessed behind that is of the token before it.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmserve.spec.draft import Draft
from mmserve.spec.drafter import FINAL, Context, Landed, Wanted
from mmserve.spec.head_files import HeadError, HeadFile
from mmserve.spec.target_parts import Linear, TargetParts

BRANCHES = 8  # a head's guesses that a tree is made of
# "medusa_head.0.0.linear.weight", as training saves them; and "blocks.0.layers.0.weight"
_BLOCK = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.linear\.(weight|bias)")
_MATRIX = re.compile(r"(?:medusa_head\.)?(\d+)\.\d+\.weight")
_OTHER = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_OTHER_MATRIX = re.compile(r"lm_heads\.(\d+)\.weight")


class Block(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)  # untrained, it guesses what the model says next
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.silu(self.linear(x))


class MedusaHeads(nn.Module):
    """Named as in public checkpoints: head, block, `linear`."""

    def __init__(self, hidden_size: int, num_heads: int, num_layers: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Sequential(*(Block(hidden_size) for _ in range(num_layers)))
            for _ in range(num_heads)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden], final hidden states -> [..., heads, hidden], as if of later tokens."""
        return torch.stack([head(hidden) for head in self.heads], -2)

    def saved(self) -> dict[str, Tensor]:
        return {n.removeprefix("heads."): t for n, t in self.state_dict().items()}


@dataclass(frozen=True, eq=False)
class Medusa:
    """`matrices`: each head's own, hidden state to scores of the whole vocabulary; None: the
    model's."""

    heads: MedusaHeads
    matrices: tuple[Linear, ...] | None
    parts: TargetParts

    @property
    def num_heads(self) -> int:
        return len(self.heads.heads)

    def scores(self, hidden: Tensor) -> Tensor:
        """[B, hidden] -> [B, heads, vocab]."""
        states = self.heads(hidden)
        if self.matrices is None:
            flat = self.parts.logits(states.flatten(0, 1))
            return flat.view(*states.shape[:2], -1)
        each = zip(self.matrices, states.unbind(1), strict=True)
        return torch.stack([matrix(state) for matrix, state in each], 1)


def load_medusa(file: HeadFile, parts: TargetParts) -> Medusa:
    """In evaluation mode, on the model's device. Raises `HeadError` for heads of another model."""
    count, layers = (
        int(file.number("medusa_num_heads", 5)),
        int(file.number("medusa_num_layers", 1)),
    )
    blocks, matrices = _sorted(file)
    count = min(count, 1 + max((head for head, _, _ in blocks), default=-1))
    heads = MedusaHeads(parts.hidden_size, count, layers)
    try:
        heads.load_state_dict(
            {
                f"heads.{h}.{b}.linear.{part}": blocks[h, b, part].float()
                for h in range(count)
                for b in range(layers)
                for part in ("weight", "bias")
            }
        )
    except (KeyError, RuntimeError) as error:
        raise HeadError(f"{file.folder} holds no Medusa heads of this model: {error}") from error
    own = None
    if len(matrices) >= count > 0:
        rows = [matrices[h].to(parts.device, parts.dtype) for h in range(count)]
        if any(m.shape[0] > parts.vocab_size for m in rows):
            raise HeadError(f"{file.folder} guesses tokens that the model does not have")
        own = tuple(parts.linear(m, None) for m in rows)
    heads.to(parts.device, parts.dtype).eval().requires_grad_(False)
    return Medusa(heads, own, parts)


def _sorted(file: HeadFile) -> tuple[dict[tuple[int, int, str], Tensor], dict[int, Tensor]]:
    """Blocks by head, number and part; matrices by head."""
    blocks: dict[tuple[int, int, str], Tensor] = {}
    matrices: dict[int, Tensor] = {}
    for name, tensor in file.tensors.items():
        if found := _BLOCK.fullmatch(name) or _OTHER.fullmatch(name):
            blocks[int(found[1]), int(found[2]), found[3]] = tensor
        elif found := _MATRIX.fullmatch(name) or _OTHER_MATRIX.fullmatch(name):
            matrices[int(found[1])] = tensor
    return blocks, matrices


class MedusaDrafter:
    """Trees of the heads' best guesses, of at most `most` tokens; 0: chains."""

    name = "medusa"
    taps = (FINAL,)

    def __init__(self, medusa: Medusa, most: int = 0) -> None:
        self._medusa, self._most = medusa, most
        self._last: dict[str, tuple[int, Tensor]] = {}  # number of the token, its state [1, hidden]

    def landed(self, context: Context, landed: Landed) -> None:
        features, known = landed.features, landed.known
        if features is not None and known:
            number = landed.first + len(known) - 1
            state = features[known[-1]][None].to(self._medusa.parts.dtype, copy=True)
            self._last[context.id] = number, state

    def end(self, context: Context) -> None:
        self._last.pop(context.id, None)

    @torch.inference_mode()
    def propose(self, wanted: Sequence[Wanted]) -> list[Draft | None]:
        drafts: list[Draft | None] = [None] * len(wanted)
        able = []
        for i, want in enumerate(wanted):
            number, state = self._last.get(want.context.id, (None, None))
            if want.length > 0 and state is not None and number == len(want.context.token_ids) - 2:
                able.append((i, state, min(want.length, self._medusa.num_heads)))
        if not able:
            return drafts
        scores = self._medusa.scores(torch.cat([state for _, state, _ in able]))
        count = min(BRANCHES if self._most else 1, scores.shape[-1])
        chances, tokens = scores.float().log_softmax(-1).topk(count, -1)
        both = zip(chances.tolist(), tokens.tolist(), strict=True)
        for (i, _, length), (of_row, guesses) in zip(able, both, strict=True):
            most = self._most or length
            drafts[i] = best_tree(of_row[:length], guesses[:length], most)
        return drafts


def best_tree(chances: Any, tokens: Any, most: int) -> Draft:
    """The likeliest tree of `most` tokens at most. chances [depth][n]: logarithms, best first, of
    tokens [depth][n], independent between depths."""
    chosen: list[int] = []
    parents: list[int] = []
    # Negative chance, when it was put there, parent, depth, which of the depth's.
    heap: list[tuple[float, int, int, int, int]] = [(-chances[0][0], 0, -1, 0, 0)]
    while heap and len(chosen) < most:
        cost, _, parent, depth, n = heapq.heappop(heap)
        number = len(chosen)
        chosen.append(tokens[depth][n])
        parents.append(parent)
        if n + 1 < len(tokens[depth]):
            beside = cost + chances[depth][n] - chances[depth][n + 1]
            heapq.heappush(heap, (beside, 2 * number + 1, parent, depth, n + 1))
        if depth + 1 < len(tokens):
            heapq.heappush(
                heap, (cost - chances[depth + 1][0], 2 * number + 2, number, depth + 1, 0)
            )
    return Draft(tuple(chosen), tuple(parents))

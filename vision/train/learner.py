"""The model as it is trained: pixels and rows of dialogues to losses.

Owns the masks, which are the served model's (an image's tokens see their image alone, text sees all
before it in its dialogue), and both losses. Knows nothing of optimisers, files or where data are
from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmserve.vision.model import VisionModel
from mmserve.vision.train.augment import augment
from mmserve.vision.train.lora import Lora
from mmserve.vision.train.packing import Shard
from mmserve.vision.train.texts import TextRows

FEW = 16  # rows that are looked at together, where nothing is learned


class Losses(NamedTuple):
    """Of one update, as tensors: cross entropy of answers, how many of their tokens are right, and
    the divergence from the base model on text."""

    answers: Tensor
    right: Tensor
    divergence: Tensor


class Learner:
    """`vision` and the LoRA of `lm` are trained, in place."""

    def __init__(self, vision: VisionModel, lm: Any, lora: Lora, device: torch.device) -> None:
        self.vision, self.lm, self.lora = vision, lm, lora
        self._device, self._half = device, device.type == "cuda"
        self._decoder = lm.get_decoder()
        self._embed: Tensor = lm.get_input_embeddings().weight
        self._rows: Tensor = lm.get_output_embeddings().weight
        self.width = self._embed.shape[1]
        if self._half:
            vision.visual.to(memory_format=torch.channels_last)

    def compile(self) -> None:
        """The repeated parts, each once for all of its like."""
        # A part that cannot be compiled runs as it is written.
        torch._dynamo.config.suppress_errors = True
        torch.backends.cudnn.benchmark = True  # an update's convolutions have one shape
        for block in (*self._decoder.layers, *self.vision.resampler.blocks):
            block.compile(dynamic=False)

    def _rounding(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._half)

    def see(self, pixels: Tensor) -> Tensor:
        """Normalised pixels [N, 3, size, size] -> latents [N, L, hidden]."""
        if self._half:
            pixels = pixels.contiguous(memory_format=torch.channels_last)
        found: Tensor = self.vision.resampler(self.vision.visual(pixels))
        return found

    def losses(self, batch: Shard, text: TextRows | None, generator: torch.Generator) -> Losses:
        """`batch`: on the device, but for its answers, which the host finds their places by without
        waiting. `text`: rows as long as the batch's. `generator`: on the device, for what is done
        to pictures."""
        answers = batch.answers.flatten().nonzero().flatten()
        answers = answers.to(self._device, non_blocking=True)
        pixels = augment(batch.pixels, generator) / self.vision.scale - self.vision.shift
        with self._rounding():
            seen = self.see(pixels)
            hidden = self._hidden(batch, seen, text)
            states = hidden[: len(batch.tokens)].flatten(0, 1)
            logits = F.linear(states[answers - 1], self._rows).float()
            wanted = batch.tokens.flatten()[answers].long()
            loss = F.cross_entropy(logits, wanted)
            right = (logits.argmax(-1) == wanted).float().mean()
            apart = logits.new_zeros(())
            if text is not None:
                apart = self._divergence(hidden[len(batch.tokens) :], text)
        return Losses(loss, right, apart)

    def _divergence(self, hidden: Tensor, text: TextRows) -> Tensor:
        """Of the base model's next tokens from ours, a token."""
        there = text.dialogue >= 0
        ours = F.linear(hidden, self._rows).float().log_softmax(-1)
        with torch.no_grad():
            base = F.linear(text.states.to(self._rows.dtype), self._rows).float().log_softmax(-1)
        apart = F.kl_div(ours, base, log_target=True, reduction="none").sum(-1)
        return (apart * there).sum() / there.sum()

    def _hidden(self, batch: Shard, seen: Tensor, text: TextRows | None) -> Tensor:
        """[R, T, hidden] behind the final norm, of the batch's rows and the text's behind them."""
        tokens, dialogue, positions = batch.tokens, batch.dialogue, batch.positions
        image = batch.image
        embeds = F.embedding(tokens.long(), self._embed)
        flat = seen.flatten(0, 1).to(embeds.dtype)
        # Text takes none of them; where it reads one nevertheless, it is not always the same: the
        # gradients of one are added up one after another.
        any_of = torch.arange(batch.latent.numel(), device=flat.device) % len(flat)
        is_image = batch.latent >= 0
        latents = flat[torch.where(is_image, batch.latent, any_of.view_as(batch.latent))]
        embeds = torch.where(is_image[..., None], latents, embeds)
        if text is not None:
            embeds = torch.cat([embeds, F.embedding(text.tokens.long(), self._embed)])
            dialogue = torch.cat([dialogue, text.dialogue])
            positions = torch.cat([positions, text.positions])
            image = torch.cat([image, torch.zeros_like(text.dialogue)])
        return self.run(embeds, dialogue, positions, image)

    def run(self, embeds: Tensor, dialogue: Tensor, positions: Tensor, image: Tensor) -> Tensor:
        """Rows [R, T, hidden] through the decoder -> the same, behind the final norm."""
        sees = seen_by(dialogue, image)
        mask = torch.zeros_like(sees, dtype=embeds.dtype).masked_fill_(~sees, float("-inf"))
        out = self._decoder(
            inputs_embeds=embeds,
            attention_mask=mask,
            position_ids=positions.long(),
            use_cache=False,
        )
        hidden: Tensor = out.last_hidden_state
        return hidden

    @torch.no_grad()
    def base_states(self, rows: TextRows) -> Tensor:
        """What the base model makes of text [R, T, hidden], a few rows at a time."""
        found = []
        with eager(), self.lora.left_out(), self._rounding():
            for i in range(0, len(rows.tokens), FEW):
                found.append(self._text(TextRows(*(tensor[i : i + FEW] for tensor in rows))))
        return torch.cat(found)

    def _text(self, rows: TextRows) -> Tensor:
        embeds = F.embedding(rows.tokens.long(), self._embed)
        return self.run(embeds, rows.dialogue, rows.positions, torch.zeros_like(rows.dialogue))

    @torch.no_grad()
    def divergence(self, rows: TextRows) -> float:
        """From the base model, a token, over all rows."""
        total, count = 0.0, 0
        with eager(), self._rounding():
            for i in range(0, len(rows.tokens), FEW):
                part = TextRows(*(tensor[i : i + FEW] for tensor in rows))
                tokens = int((part.dialogue >= 0).sum())
                total += self._divergence(self._text(part), part).item() * tokens
                count += tokens
        return round(total / count, 5)

    @torch.no_grad()
    def whole_answers(self, shard: Shard) -> Tensor:
        """[R, most dialogues in a row] bool: of which each token of an answer is the likeliest
        behind the true ones. `shard`: on any device."""
        shard = Shard(*(part.to(self._device) for part in shard))  # answers, too
        pixels = shard.pixels / self.vision.scale - self.vision.shift
        with eager(), self._rounding():
            hidden = self._hidden(shard, self.see(pixels), None)
            answers = shard.answers.flatten().nonzero().flatten()
            guesses = F.linear(hidden.flatten(0, 1)[answers - 1], self._rows).argmax(-1)
        right = shard.answers.clone()
        right.view(-1)[answers] = guesses == shard.tokens.flatten()[answers]
        number = shard.dialogue.long() + 1  # 0 where there is none
        most = int(number.max()) + 1
        asked = F.one_hot(number * shard.answers, most).sum(1)
        wrong = F.one_hot(number * (shard.answers & ~right), most).sum(1)
        return ((wrong == 0) & (asked > 0))[:, 1:]

    def groups(self, frozen: tuple[str, ...]) -> dict[str, list[nn.Parameter]]:
        """The parameters that are trained, by what they belong to. `frozen`: beginnings of names of
        the vision model's that are not. Raises ValueError where one begins none."""
        names = [name for name, _ in self.vision.named_parameters()]
        if idle := [f for f in frozen if not any(n.startswith(f) for n in names)]:
            raise ValueError(f"the vision model has no part {idle[0]}")
        for name, parameter in self.vision.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
        vision = self.vision
        return {
            "encoder": [p for p in vision.visual.parameters() if p.requires_grad],
            "compressor": [p for p in vision.resampler.parameters() if p.requires_grad],
            "lora": self.lora.parameters(),
        }


@contextmanager
def eager() -> Iterator[None]:
    """For shapes that come once: what is compiled runs as it is written."""
    with torch.compiler.set_stance("force_eager"):
        yield


def seen_by(dialogue: Tensor, image: Tensor) -> Tensor:
    """[R, T] -> bool [R, 1, T, T]: whether the row's token sees the column's. A token of an image
    sees its image, both ways; any other sees what stands before it in its dialogue, and itself."""
    order = torch.arange(dialogue.shape[1], device=dialogue.device)
    causal = order[:, None] >= order
    same_image = image[:, :, None] == image[:, None]
    sees = torch.where(image[:, :, None] > 0, same_image, causal)
    return (sees & (dialogue[:, :, None] == dialogue[:, None]))[:, None]

"""One plain pass of the model over finished chats: what it makes of every token.

Owns the dense batches and their masks. The model is transformers' own, not fused. Knows nothing of
engines; a native composition's images are read as the engine reads them (see the design's law:
image tokens see their own image, text sees all before it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmserve.config import ImageLimits
from mmserve.model.loader import LoadedModel
from mmserve.model.weights import Loaded
from mmserve.train_drafter.corpus import Corpus
from mmserve.train_drafter.pictures import picture
from mmserve.train_drafter.writing import PICTURES, Chat
from mmserve.vision.preprocess import decode

MOST_TOKENS = {"cuda": 1 << 15, "cpu": 1 << 10}  # of a batch, with its padding
FINAL = -1


class _Rows(NamedTuple):
    """A chat as rows: `embeds` [T, hidden]; `image_of` [T] int64: 0 for text; of its text, tokens
    and whether each is of the answer."""

    embeds: Tensor
    image_of: Tensor
    tokens: list[int]
    answers: list[bool]


class Collector:
    """Runs `loaded.lm`, in `dtype`, and listens to the layers `taps`."""

    def __init__(
        self, loaded: Loaded, taps: Sequence[int], dtype: torch.dtype, longest: int
    ) -> None:
        """`longest`: rows of a chat; what is behind is left out."""
        self._lm: Any = loaded.lm.to(dtype)
        self._loaded, self._taps, self._dtype = loaded, tuple(taps), dtype
        self._longest, self._device = longest, loaded.device
        self._see = lru_cache(PICTURES)(self._picture)

    @torch.no_grad()
    def collect(
        self, chats: Sequence[Chat], told: Callable[[int], None] = lambda n: None
    ) -> Corpus:
        """`told` how many chats are done, now and then."""
        order = sorted(range(len(chats)), key=lambda i: (chats[i].kind, _length(chats[i])))
        tokens: list[Tensor] = []
        answers: list[Tensor] = []
        features: list[Tensor] = []
        finals: list[Tensor] = []
        done = 0
        for part in self._parts([chats[i] for i in order]):
            rows = [self._rows(chat) for chat in part]
            tapped, last = self._run(rows)
            for b, row in enumerate(rows):
                text = (row.image_of == 0).nonzero()[:, 0].to(self._device)
                features.append(tapped[b, text])
                finals.append(last[b, text])
                tokens.append(torch.tensor(row.tokens))
                answers.append(torch.tensor(row.answers))
            done += len(part)
            told(done)
        lengths, read = torch.tensor([0, *map(len, tokens)]), torch.cat(features)
        return Corpus(
            torch.cat(tokens).to(self._device),
            torch.cat(answers).to(self._device),
            read,
            read if self._taps == (FINAL,) else torch.cat(finals),
            lengths.cumsum(0),
        )

    def _parts(self, chats: Sequence[Chat]) -> Iterator[list[Chat]]:
        """Of one kind, like lengths and no more tokens than a batch may have."""
        most, held = MOST_TOKENS[self._device.type], list[Chat]()
        for chat in chats:
            full = (len(held) + 1) * min(_length(chat), self._longest) > most
            if held and (full or held[0].kind != chat.kind):
                yield held
                held = []
            held.append(chat)
        if held:
            yield held

    def _rows(self, chat: Chat) -> _Rows:
        parts: list[Tensor] = []
        image_of: list[int] = []
        tokens: list[int] = []
        images = 0
        for piece in (*chat.pieces, chat.answer):
            if isinstance(piece, int):
                images += 1
                parts.append(self._see(piece))
                image_of += [images] * len(parts[-1])
            else:
                ids = torch.tensor(piece, device=self._device)
                parts.append(self._lm.get_input_embeddings()(ids))
                image_of += [0] * len(piece)
                tokens += piece
        kept = torch.tensor(image_of[: self._longest])
        count, answer = int((kept == 0).sum()), len(chat.answer)
        said = [i >= len(tokens) - answer for i in range(len(tokens))]
        return _Rows(torch.cat(parts)[: self._longest], kept, tokens[:count], said[:count])

    def _picture(self, number: int) -> Tensor:
        """An image's visual tokens [n, hidden]."""
        assert isinstance(self._loaded, LoadedModel), "only native compositions' images are read"
        spec = self._loaded.spec
        pixels = decode(picture(number), ImageLimits(), spec.image_size)
        return self._loaded.vision.encode(torch.as_tensor(pixels)[None])[0].to(self._dtype)

    def _run(self, rows: Sequence[_Rows]) -> tuple[Tensor, Tensor]:
        """[B, L, F] and [B, L, hidden]."""
        length = max(len(row.image_of) for row in rows)
        embeds = torch.zeros(
            *(len(rows), length, rows[0].embeds.shape[1]), dtype=self._dtype, device=self._device
        )
        image_of = torch.zeros(len(rows), length, dtype=torch.long)
        for b, row in enumerate(rows):
            embeds[b, : len(row.embeds)] = row.embeds
            image_of[b, : len(row.image_of)] = row.image_of
        mask = None  # causal; what stands behind a chat is seen by nobody in it
        if bool(image_of.any()):
            seen = _seen(image_of.to(self._device))
            mask = torch.zeros_like(seen, dtype=self._dtype).masked_fill(~seen, float("-inf"))
        with self._listening() as heard:
            out = self._lm.get_decoder()(
                inputs_embeds=embeds,
                attention_mask=mask,
                position_ids=torch.arange(length, device=self._device)[None],
                use_cache=False,
            )
        last = out.last_hidden_state
        return torch.cat([last if t == FINAL else heard[t] for t in self._taps], -1), last

    @contextmanager
    def _listening(self) -> Iterator[dict[int, Tensor]]:
        heard: dict[int, Tensor] = {}
        layers = self._lm.get_decoder().layers

        def keep(tap: int) -> Callable[..., None]:
            def hook(_: Any, __: Any, out: Any) -> None:
                heard[tap] = out if isinstance(out, Tensor) else out[0]

            return hook

        hooks = [layers[tap].register_forward_hook(keep(tap)) for tap in self._taps if tap >= 0]
        try:
            yield heard
        finally:
            for hook in hooks:
                hook.remove()


def _length(chat: Chat) -> int:
    return len(chat.answer) + sum(len(p) for p in chat.pieces if not isinstance(p, int))


def _seen(image_of: Tensor) -> Tensor:
    """[B, L] -> bool [B, 1, L, L]: whether the row's token sees the column's."""
    order = torch.arange(image_of.shape[1], device=image_of.device)
    causal = order[:, None] >= order
    same = image_of[:, :, None] == image_of[:, None]
    return torch.where(image_of[:, :, None] > 0, same, causal)[:, None]

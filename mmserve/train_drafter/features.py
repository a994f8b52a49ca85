"""One plain pass of the model over finished chats: what it makes of every token.

Owns the dense batches and their masks. The model is transformers' own, not fused. Knows nothing of
engines; a native composition's images are read as the engine reads them (see the design's law:
image tokens see their own image, text sees all before it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmserve.config import ImageLimits
from mmserve.engine.taps import Taps
from mmserve.model.loader import LoadedModel
from mmserve.model.weights import Loaded
from mmserve.spec.drafter import FINAL
from mmserve.train_drafter.corpus import Corpus
from mmserve.train_drafter.pictures import PICTURES, picture
from mmserve.train_drafter.writing import Chat
from mmserve.vision.preprocess import decode

MOST_TOKENS = {"cuda": 1 << 15, "cpu": 1 << 10}  # of a batch, with its padding


class _Rows(NamedTuple):
    """Chats as rows [B, L], on the CPU: `tokens` int64, 0 in images; `image_of` int64: 0 for text;
    `text` and `answers` bool: which rows are text of a chat, and which of its answer. `images`:
    chat, first row and number of each picture."""

    tokens: Tensor
    image_of: Tensor
    text: Tensor
    answers: Tensor
    images: list[tuple[int, int, int]]


class Collector:
    """Runs `loaded.lm`, in `dtype`, and listens to the layers `taps`."""

    def __init__(
        self, loaded: Loaded, taps: Sequence[int], dtype: torch.dtype, longest: int
    ) -> None:
        """`longest`: rows of a chat; what is behind is left out. Raises ValueError for a layer that
        the model does not have."""
        count = len(loaded.lm.get_decoder().layers)
        if strange := [tap for tap in taps if not FINAL <= tap < count]:
            raise ValueError(f"{loaded.name} has layers 0 to {count - 1}, no {strange[0]}")
        self._lm: Any = loaded.lm.to(dtype)
        self._loaded, self._taps, self._dtype = loaded, tuple(taps), dtype
        self._longest, self._device = longest, loaded.device
        self._see = lru_cache(PICTURES)(self._picture)

    @torch.no_grad()
    def collect(
        self, chats: Sequence[Chat], told: Callable[[int], None] = lambda n: None
    ) -> Corpus:
        """`told` how many chats are done, now and then."""
        order = sorted(chats, key=lambda chat: (chat.kind, _length(chat)))
        tokens: list[Tensor] = []
        answers: list[Tensor] = []
        features: list[Tensor] = []
        finals: list[Tensor] = []
        lengths = [torch.zeros(1, dtype=torch.long)]
        done = 0
        for part in self._parts(order):
            rows = self._rows(part)
            tapped, last = self._run(rows)
            text = rows.text.to(self._device)
            features.append(tapped[text])
            if self._taps[-1] != FINAL:  # else they are a part of the features
                finals.append(last[text])
            tokens.append(rows.tokens[rows.text])
            answers.append(rows.answers[rows.text])
            lengths.append(rows.text.sum(1))
            done += len(part)
            told(done)
        read = torch.cat(features)
        return Corpus(
            torch.cat(tokens).to(self._device),
            torch.cat(answers).to(self._device),
            read,
            torch.cat(finals) if finals else read[:, -last.shape[-1] :],
            torch.cat(lengths).cumsum(0),
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

    def _rows(self, chats: Sequence[Chat]) -> _Rows:
        laid = [self._laid(chat) for chat in chats]
        length = min(max(len(row) for row, _ in laid), self._longest)
        rows = _Rows(
            torch.zeros(len(chats), length, dtype=torch.long),
            torch.zeros(len(chats), length, dtype=torch.long),
            torch.zeros(len(chats), length, dtype=torch.bool),
            torch.zeros(len(chats), length, dtype=torch.bool),
            [],
        )
        for b, (chat, (row, images)) in enumerate(zip(chats, laid, strict=True)):
            kept = torch.tensor(row[:length])
            text = kept >= 0
            rows.tokens[b, : len(kept)] = kept.clamp(min=0)
            rows.text[b, : len(kept)] = text
            rows.image_of[b, : len(kept)] = torch.where(text, 0, -kept)
            rows.answers[b, len(row) - len(chat.answer) : len(kept)] = True
            rows.images.extend((b, first, number) for first, number in images)
        return rows

    def _laid(self, chat: Chat) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens, -1 and on for those of the first image and on; first row and number of each."""
        row: list[int] = []
        images: list[tuple[int, int]] = []
        for piece in (*chat.pieces, chat.answer):
            if isinstance(piece, int):
                images.append((len(row), piece))
                row += [-len(images)] * len(self._see(piece))
            else:
                row += piece
        return row, images

    def _picture(self, number: int) -> Tensor:
        """An image's visual tokens [n, hidden]."""
        assert isinstance(self._loaded, LoadedModel), "only native compositions' images are read"
        spec = self._loaded.spec
        pixels = decode(picture(number), ImageLimits(), spec.image_size)
        return self._loaded.vision.encode(torch.as_tensor(pixels)[None])[0].to(self._dtype)

    def _run(self, rows: _Rows) -> tuple[Tensor, Tensor]:
        """[B, L, F] and [B, L, hidden]."""
        length = rows.tokens.shape[1]
        embeds = self._lm.get_input_embeddings()(rows.tokens.to(self._device))
        for b, first, number in rows.images:
            seen = self._see(number)[: max(length - first, 0)]
            embeds[b, first : first + len(seen)] = seen
        mask = None  # causal; what stands behind a chat is seen by nobody in it
        if rows.images:
            sees = _seen(rows.image_of.to(self._device))
            mask = torch.zeros_like(sees, dtype=self._dtype).masked_fill(~sees, float("-inf"))
        decoder = self._lm.get_decoder()
        with closing(Taps(decoder.layers, self._taps, embeds.shape[-1])) as taps:
            out = decoder(
                inputs_embeds=embeds,
                attention_mask=mask,
                position_ids=torch.arange(length, device=self._device)[None],
                use_cache=False,
            )
            last = out.last_hidden_state
            features = taps.features(taps.join(last.flatten(0, 1)))
        return features.view(*last.shape[:2], -1), last


def _length(chat: Chat) -> int:
    return len(chat.answer) + sum(len(p) for p in chat.pieces if not isinstance(p, int))


def _seen(image_of: Tensor) -> Tensor:
    """[B, L] -> bool [B, 1, L, L]: whether the row's token sees the column's."""
    order = torch.arange(image_of.shape[1], device=image_of.device)
    causal = order[:, None] >= order
    same = image_of[:, :, None] == image_of[:, None]
    return torch.where(image_of[:, :, None] > 0, same, causal)[:, None]

"""A slow, dense statement of what the served model computes: the paged engine must equal it.

One plain transformers forward over the whole sequence for every token, no cache, with the mask and
positions written out. Image tokens see their own image, both ways; text sees all before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from mmserve.config import ImageLimits
from mmserve.model.loader import LoadedModel
from mmserve.request import ImageSegment, Segment, TextSegment
from mmserve.vision.preprocess import decode_pieces


@torch.no_grad()
def dense_generate(
    loaded: LoadedModel, segments: Sequence[Segment], max_new: int
) -> tuple[list[int], Tensor]:
    """Greedy continuation of a prompt: at most `max_new` token ids, up to and with end-of-turn.

    Returns the ids and the logits each was chosen from, float32 [num_ids, vocab_size].
    """
    lm = cast(Any, loaded.lm)
    embeddings, image_of = embed(loaded, segments)
    ids: list[int] = []
    logits: list[Tensor] = []
    while len(ids) < max_new and (not ids or ids[-1] != lm.config.eos_token_id):
        row = dense_logits(loaded, embeddings, image_of)[-1]
        logits.append(row)
        ids.append(int(row.argmax()))
        token = lm.get_input_embeddings()(torch.tensor(ids[-1:], device=loaded.device))
        embeddings = torch.cat([embeddings, token])
        image_of = [*image_of, 0]
    return ids, torch.stack(logits)


@torch.no_grad()
def dense_logits(loaded: LoadedModel, embeddings: Tensor, image_of: Sequence[int]) -> Tensor:
    """Logits of every position: embeddings [T, hidden] -> float32 [T, vocab_size]."""
    lm = cast(Any, loaded.lm)
    # Any other attention would ignore the mask.
    assert lm.config._attn_implementation in ("sdpa", "eager")
    mask = additive(image_mask(image_of)).to(loaded.device)
    out = lm(
        inputs_embeds=embeddings[None],
        attention_mask=mask,
        position_ids=torch.arange(len(image_of), device=loaded.device)[None],
        use_cache=False,
    )
    return cast(Tensor, out.logits[0].float())


def windowed_mask(image_of: Sequence[int], window: int, sinks: int = 0) -> Tensor:
    """`image_mask` of a layer that reads the last `window` tokens and the first `sinks`; an image
    reads itself whole."""
    order = torch.arange(len(image_of))
    near = order[:, None] - order[None, :] < window
    of_image = torch.tensor(list(image_of)) > 0
    return image_mask(image_of) & (near | (order < sinks)[None, :] | of_image[:, None])


def additive(seen: Tensor) -> Tensor:
    """bool [T, T] -> float32 [1, 1, T, T], as every attention of transformers takes it."""
    return torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[None, None]


class LayerMasks:
    """Gives each layer of a plain model its own mask, in place of the one it is called with."""

    def __init__(self, lm: Any, choose: Callable[[int], int]) -> None:
        """`choose`: which of `masks` a layer has, by its number."""
        self.masks: Sequence[Tensor] = ()  # as `additive` makes them
        for number, layer in enumerate(lm.model.layers):
            layer.self_attn.register_forward_pre_hook(self._hook(choose(number)), with_kwargs=True)

    def _hook(self, which: int) -> Any:
        def give(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            return args, {**kwargs, "attention_mask": self.masks[which]}

        return give


@torch.no_grad()
def embed(loaded: LoadedModel, segments: Sequence[Segment]) -> tuple[Tensor, list[int]]:
    """A prompt's embeddings [T, hidden], and of each token its image: 1, 2, ... or 0 for text."""
    parts: list[Tensor] = []
    image_of: list[int] = []
    num_images = 0
    for segment in segments:
        if isinstance(segment, TextSegment):
            ids = torch.tensor(segment.token_ids, dtype=torch.long, device=loaded.device)
            parts.append(cast(Any, loaded.lm).get_input_embeddings()(ids))
            image_of += [0] * len(segment.token_ids)
        else:
            num_images += 1
            parts.append(_see(loaded, segment))
            image_of += [num_images] * len(parts[-1])
    return torch.cat(parts), image_of


def image_mask(image_of: Sequence[int]) -> Tensor:
    """bool [T, T]: whether the row's token sees the column's."""
    image = torch.tensor(list(image_of))
    order = torch.arange(len(image))
    causal = order[:, None] >= order[None, :]
    same = image[:, None] == image[None, :]
    return torch.where(image[:, None] > 0, same, causal)


def _see(loaded: LoadedModel, segment: ImageSegment) -> Tensor:
    """An image's visual tokens [num_tokens, hidden]."""
    image, spec = segment.image, loaded.spec
    pixels = image.pixels
    if pixels is None:
        crops = max(image.num_tokens // spec.num_image_tokens - 1, 0)
        pixels = decode_pieces(image.data, ImageLimits(), spec.image_size, crops)
    return loaded.vision.encode(torch.as_tensor(pixels)).flatten(0, 1)[: image.num_tokens]

"""A transformers model as the runner sees it: a decoder stack between an embedding and a head.

Owns what differs between models: which layers read what, who sees whom, how many axes positions
have, what an image feeds the decoder. The model itself is asked for all of it, by running it on
next to nothing and listening, so that a family needs words here only where transformers decides
outside of its modules. Knows nothing of sequences, pages or scheduling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmserve.cache.layer_group import LayerGroup
from mmserve.model import attention, rope, span_attention
from mmserve.model.cross_attention import CrossAttention


@dataclass(frozen=True)
class Sight:
    """What a model lets its tokens see beyond the ones before them.

    `whole_images`: an image's rows see all of their own image. `whole_prompt`: the rows of a prompt
    with images see all of it, past windows too.
    """

    whole_images: bool = False
    whole_prompt: bool = False


CAUSAL = Sight()


class Features(NamedTuple):
    """What one image feeds the decoder: `embeds` [n, hidden] for its run of tokens; `deep`: what is
    added to the hidden states of the rows `deep_rows` [n] bool behind the first layers, each
    [rows, hidden] (Qwen3-VL)."""

    embeds: Tensor
    deep: tuple[Tensor, ...] = ()
    deep_rows: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        rows = () if self.deep_rows is None else (self.deep_rows,)
        return (self.embeds, *self.deep, *rows)

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.tensors)

    def on(self, device: torch.device) -> Features:
        """Copied there, when this returns, unless they are there already."""
        deep, rows = tuple(level.to(device) for level in self.deep), self.deep_rows
        return Features(self.embeds.to(device), deep, None if rows is None else rows.to(device))

    def first(self, count: int) -> Features:
        """Of the first `count` tokens alone."""
        if self.deep_rows is None or count == len(self.embeds):
            return Features(self.embeds[:count], self.deep, self.deep_rows)
        rows = self.deep_rows[:count]
        deep = tuple(level[: int(rows.sum())] for level in self.deep)
        return Features(self.embeds[:count], deep, rows)


# Of the native composition, whose images have no order inside.
WHOLE_IMAGES = Sight(whole_images=True)

# transformers builds these masks outside of the model's modules.
_SIGHTS = {"gemma3": WHOLE_IMAGES, "paligemma": Sight(whole_prompt=True)}
_FIRST_POSITION = {"paligemma": 1}


class Adapter:
    """Sets the model's attention and rotary angles to ours. The model is in evaluation mode on one
    device. `rope_scaling`: on demand, see `rope.asked`."""

    def __init__(self, model: Any, rope_scaling: Mapping[str, Any] | None = None) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        self.decoder = model.get_decoder()
        self.embedding = model.get_input_embeddings()
        kind = model.config.model_type
        self.sight = _SIGHTS.get(kind, CAUSAL)
        self.first_position = _FIRST_POSITION.get(kind, 0)
        declared = getattr(self.config, "rope_parameters", None) or {}
        self.axes = 3 if "mrope_section" in declared else 1
        self.rope, regimes = rope.install(self.decoder, self.config, rope_scaling)
        attention.register()
        self.config._attn_implementation = attention.NAME
        span_attention.install(model)
        self.cross = CrossAttention.install(self.decoder)
        self.regimes = replace(regimes, turns_images=self.cross is None)
        self.layers = self._probe()
        self.groups = _groups(self.layers)
        self.vocab_size = len(model.get_output_embeddings().weight)  # of the logits
        self._plain_head = self._has_plain_head()

    @property
    def device(self) -> torch.device:
        device: torch.device = self.embedding.weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.embedding.weight.dtype
        return dtype

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, hidden]."""
        embeds: Tensor = self.embedding(token_ids)
        return embeds

    def decode(
        self,
        embeds: Tensor,
        positions: Tensor,
        step: Any,
        regimes: Tensor | None = None,
        **extra: Any,
    ) -> Tensor:
        """embeds [T, hidden], positions [T] or [axes, T], regimes [T] (None: all 0) -> hidden
        states [T, hidden]."""
        if self.rope is not None:
            self.rope.regimes = regimes
        where = positions + self.first_position if self.first_position else positions
        out = self.decoder(
            inputs_embeds=embeds[None],
            position_ids=where[:, None] if where.dim() > 1 else where[None],
            attention_mask=None,
            use_cache=False,
            step=step,
            **extra,
        )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, vocab] as the model's own forward makes them, caps and scales too."""
        if not self._plain_head:
            return self._whole_head(hidden)
        out: Tensor = self.model.get_output_embeddings()(hidden)  # whatever stands there by now
        return out

    def look(self, token_ids: tuple[int, ...], inputs: Mapping[str, Any]) -> Features:
        """What an image's run of tokens becomes, from the processor's tensors for the image."""
        seen = self._listen(torch.tensor([token_ids], device=self.device), inputs)
        rows = seen.get("visual_pos_masks")
        deep = seen.get("deepstack_visual_embeds") or ()
        return Features(
            seen["inputs_embeds"][0], tuple(deep), None if rows is None else rows[0].bool()
        )

    def cross_states(self, inputs: Mapping[str, Any]) -> Tensor:
        """[n, hidden]: what cross-attention layers project an image's keys and values from."""
        token = torch.tensor([[self.model.config.image_token_id]], device=self.device)
        states: Tensor = self._listen(token, inputs)["cross_attention_states"]
        return states.flatten(0, -2)

    def turning_frequencies(self) -> Tensor | None:
        """[D / 2] float32: what every layer's queries and keys are rotated by, whole heads; None
        where layers differ, lengths matter, or only parts of heads are rotated."""
        head_dim = next(iter(self.layers.values())).head_dim
        modules: list[Any] = [] if self.rope is None else list(self.rope.by_regime)
        if len(modules) != 1 or self.regimes.trained is not None:
            return None
        module = modules[0]
        found = getattr(module, "inv_freq", None)
        whole = isinstance(found, Tensor) and 2 * len(found) == head_dim
        return found if whole else None

    def extras(self, images: list[tuple[int, Features]], num_rows: int) -> dict[str, Any]:
        """Further arguments of `decode` for images, each from its row on."""
        if not any(features.deep for _, features in images):
            return {}
        mask = torch.zeros(1, num_rows, dtype=torch.bool, device=self.device)
        for first, features in images:
            assert features.deep_rows is not None
            mask[0, first : first + len(features.deep_rows)] = features.deep_rows
        levels = zip(*(features.deep for _, features in images), strict=True)
        return {
            "visual_pos_masks": mask,
            "deepstack_visual_embeds": [torch.cat(level) for level in levels],
        }

    # -- asking the model -----------------------------------------------------------------------

    def _listen(self, token_ids: Tensor, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """What the model would call its decoder with."""
        tensors = {
            name: value.to(self.device, self.dtype if value.is_floating_point() else None)
            for name, value in inputs.items()
            if isinstance(value, Tensor)
        }
        rest = {name: value for name, value in inputs.items() if name not in tensors}
        count = token_ids.shape[1]
        where = torch.arange(count, device=self.device).expand(self.axes, 1, count)

        def hear(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
            raise _Heard(kwargs)

        hook = self.decoder.register_forward_pre_hook(hear, with_kwargs=True)
        try:
            self.model.model(
                input_ids=token_ids,
                attention_mask=torch.ones_like(token_ids),
                position_ids=where if self.axes > 1 else where[0],
                use_cache=False,
                **tensors,
                **rest,
            )
        except _Heard as heard:
            return heard.kwargs
        finally:
            hook.remove()
        raise ValueError(f"{type(self.model).__name__} never calls its decoder")

    @torch.inference_mode()
    def _probe(self) -> dict[int, attention.Layer]:
        """Every layer's heads, width and window, as its attention is called."""
        probe = attention.Probe()
        embeds = torch.zeros(1, self.hidden_size, device=self.device, dtype=self.dtype)
        positions = torch.zeros(1, dtype=torch.long, device=self.device)
        extra = self.cross.arguments(positions == 0) if self.cross else {}
        where = positions.expand(self.axes, 1) if self.axes > 1 else positions
        self.decode(embeds, where, probe, **extra)
        silent = set(range(len(self.decoder.layers))) - set(probe.layers)
        if silent:
            raise ValueError(
                f"{len(silent)} of its {len(self.decoder.layers)} layers are not attention over "
                "keys and values (as in recurrent and hybrid models), or are not called through "
                "transformers' interface"
            )
        return probe.layers

    @torch.inference_mode()
    def _has_plain_head(self) -> bool:
        """Whether the output matrix is all there is behind the stack, without caps and scales."""
        hidden = torch.randn(2, self.hidden_size, device=self.device, dtype=self.dtype)
        return torch.equal(self._whole_head(hidden), self.model.get_output_embeddings()(hidden))

    def _whole_head(self, hidden: Tensor) -> Tensor:
        body, self.model.model = self.model.model, _Given(hidden)
        try:
            out: Tensor = self.model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        finally:
            self.model.model = body
        return out


class _Heard(Exception):
    def __init__(self, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.kwargs = kwargs


class _Given(nn.Module):
    """Stands where a stack stood, and gives these hidden states [N, hidden]."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *_: Any, **__: Any) -> Any:
        return _Output(last_hidden_state=self.hidden[None])


class _Output(SimpleNamespace):
    """As transformers' outputs: by name or number; what is not there is None."""

    def __getitem__(self, index: int) -> Any:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def _groups(layers: Mapping[int, attention.Layer]) -> tuple[LayerGroup, ...]:
    """Layers by what they read: everything, smaller windows, images alone."""
    crossed = any(layer.cross for layer in layers.values())
    kinds: dict[tuple[bool, int | None], list[int]] = {}
    for index, layer in sorted(layers.items()):
        kinds.setdefault((layer.cross, layer.window), []).append(index)
    order = sorted(kinds, key=lambda kind: (kind[0], kind[1] is not None, -(kind[1] or 0)))
    return tuple(
        LayerGroup(tuple(kinds[kind]), kind[1], text=not kind[0], images=kind[0] or not crossed)
        for kind in order
    )

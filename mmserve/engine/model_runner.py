"""The model runner: a `Batch` in, logits out.

Owns the device, the fused model and both pools' tensors. Knows nothing of queues, text or sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmserve.cache.kv_pool import KVShape, TextKVPool, VisionKVPool
from mmserve.cache.layer_group import LayerGroup, set_apart
from mmserve.cache.pool_sizes import text_budgets, vision_budgets
from mmserve.config import CacheConfig, ModelConfig, SchedulerConfig
from mmserve.engine.feature_cache import Done, FeatureCache
from mmserve.engine.page_copy import copy_pages
from mmserve.engine.plan import Planner, StepInput, chosen_rows, seen_rows
from mmserve.engine.rows import slots_in
from mmserve.engine.taps import Heard, Taps
from mmserve.engine.team import Team, followed
from mmserve.engine.transfer import upload
from mmserve.engine.vision_mode import vision_mode
from mmserve.errors import first_line
from mmserve.kernels.chain import has_kernels
from mmserve.kernels.kv_formats import FORMATS, PLAIN, KVFormat
from mmserve.kernels.reference import AttentionPlan, angle_table, rope_table, write_kv
from mmserve.model import attention
from mmserve.model.adapter import Adapter, Features
from mmserve.model.cpu_layer import CPULayer
from mmserve.model.fuse import fuse
from mmserve.model.loader import LoadedModel
from mmserve.model.rope import Block, stack_tables
from mmserve.model.weights import Loaded
from mmserve.request import ImageInput
from mmserve.scheduler.batch import Batch, Chunk, ImageJob, PageCopy
from mmserve.scheduler.open_pages import most_open


class Logits(NamedTuple):
    """`values` [R, vocab], floats: the next token's logits of each sampling chunk, in order; of one
    with a draft, `Chunk.num_chosen` rows."""

    chunks: list[Chunk]
    values: Tensor


def resolve_dtype(name: str, device: torch.device, *, stock: bool = False) -> str:
    """`auto` is bfloat16 on a GPU with our kernels, int8 on a CPU, there float32 for a `stock`
    model, which has to give transformers' tokens.

    Raises ValueError.
    """
    known = ["float32"]
    if device.type == "cpu" and not stock:
        known = ["int8", "float32"]
    elif has_kernels(device):
        known = ["bfloat16", "float32"]
    if name == "auto":
        return known[0]
    if name not in known:
        raise ValueError(f"dtype {name!r} is none of auto, {', '.join(known)} on {device.type}")
    return name


class ModelRunner:
    """Runs images and text of one step. Fuses `loaded.lm` in place."""

    # The step is this thread's own work, so one launched ahead would only delay the answers.
    overlaps = False
    # Whether images are looked at while steps run, so that a step need not wait for them.
    sees_beside = False

    def __init__(
        self,
        loaded: Loaded,
        cache: CacheConfig,
        model: ModelConfig,
        steps: SchedulerConfig | None = None,
        team: Team | None = None,
    ) -> None:
        """`steps`: what one step may hold, where windows get room by it; `team`: with whom the
        model is computed."""
        self.team = team or Team()
        self.lm: Any = loaded.lm
        self.vision_model: Any = getattr(loaded, "vision", None)
        self.stock = loaded.stock
        self.device = loaded.device
        self.dtype = resolve_dtype(model.dtype, self.device, stock=loaded.stock)
        if self.dtype == "bfloat16":
            self.lm.to(torch.bfloat16)
        self.adapter = _adapt(self.lm, loaded)
        self.regimes = self.adapter.regimes
        self.sight = loaded.sight if isinstance(loaded, LoadedModel) else self.adapter.sight
        self.groups = self._groups(cache)
        self.mode = vision_mode(
            model.vision_mode,
            self.adapter,
            stock=loaded.stock,
            head=model.blend_tokens,
            page_size=cache.page_size,
        )
        self.in_context = self.mode.in_context
        self._listen(())
        self.table, blocks = self._table(loaded.max_model_len)
        self._places = attention.places(self.groups)
        self._planner = Planner(
            self.groups,
            self.table,
            cache.page_size,
            sight=self.sight,
            axes=self.adapter.axes if self.stock else 0,
            blocks=blocks,
        )
        # int32 [4, N], as mmserve.kernels.graft says: drafts that only the device has seen stand
        # here; None: all have to be read before they are laid out.
        self.grown: Tensor | None = None
        self.text, self.vision = self._pools(cache, steps or SchedulerConfig())
        opened = [pool.residual for pool in self.text if pool.residual is not None]
        self.num_open = opened[0].tensor.shape[3] if opened else 0  # pages of the residual
        self._features = FeatureCache(cache.feature_bytes)
        self._fuse()
        self.team.begin(self.device, self.adapter.dtype)
        if self.team.leads:
            self._warm_up(self.adapter.hidden_size)

    def _table(self, num_positions: int) -> tuple[Tensor, tuple[Block, ...]]:
        """What the native composition rotates by, and queries are turned by to images."""
        adapter = self.adapter
        head_dim = next(iter(adapter.layers.values())).head_dim
        if self.stock:
            turns = self.mode.turns_queries and adapter.cross is None
            frequencies = adapter.turning_frequencies() if turns else None
            if frequencies is None:
                return rope_table(1, head_dim, 1.0).to(self.device), (Block(),)
            return angle_table(num_positions, frequencies).to(self.device), (Block(),)
        theta = float(adapter.config.rope_parameters["rope_theta"])
        table = rope_table(num_positions, head_dim, theta)
        if adapter.rope is None:
            return table.to(self.device), (Block(),)
        table, blocks = stack_tables(table, adapter.rope)
        return table.to(self.device), blocks

    def _groups(self, cache: CacheConfig) -> tuple[LayerGroup, ...]:
        """Raises ValueError for a text format that the model's prompts cannot have."""
        groups = set_apart(self.adapter.groups, cache.skip_layers)
        if not FORMATS[cache.text_format].whole_pages:
            return groups
        if self.sight.whole_prompt:
            raise ValueError(
                f"KV of text cannot be {cache.text_format} with this model: all of a prompt sees "
                "all of it, also pages that are not full yet"
            )
        plain = [group.layers[0] in cache.skip_layers or not group.text for group in groups]
        parts = zip(groups, plain, strict=True)
        return tuple(replace(group, residual=not whole) for group, whole in parts)

    def _pools(
        self, cache: CacheConfig, steps: SchedulerConfig
    ) -> tuple[tuple[TextKVPool, ...], tuple[VisionKVPool, ...]]:
        """By layer group."""
        own, seen = (
            [self._shape(group, cache, FORMATS[name]) for group in self.groups]
            for name in (cache.text_format, cache.vision_format)
        )
        text = text_budgets(
            self.groups,
            [shape.page_bytes for shape in own],
            cache.text_bytes,
            page_size=cache.page_size,
            max_num_seqs=steps.max_num_seqs,
            max_num_batched_tokens=steps.max_num_batched_tokens,
        )
        sizes = [shape.page_bytes for shape in seen]
        vision = vision_budgets(self.groups, sizes, cache.vision_bytes)
        most = most_open(cache.page_size, steps.max_num_seqs, steps.max_num_batched_tokens)
        opened = [most if group.residual else 0 for group in self.groups]
        return tuple(map(TextKVPool, own, text, opened)), tuple(map(VisionKVPool, seen, vision))

    def _shape(self, group: LayerGroup, cache: CacheConfig, kind: KVFormat) -> KVShape:
        layer = self.adapter.layers[group.layers[0]]
        if kind.bits and layer.head_dim % kind.parts:
            raise ValueError(f"heads of {layer.head_dim} dimensions cannot be held in {kind.name}")
        return KVShape(
            num_layers=len(group.layers),
            num_kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            page_size=cache.page_size,
            dtype=self.adapter.dtype,
            device=self.device,
            kind=PLAIN if group.layers[0] in cache.skip_layers else kind,
        )

    @property
    def deterministic(self) -> bool:
        """Whether a request's bits do not depend on what runs beside it."""
        layers = self.adapter.decoder.layers
        return self.dtype == "int8" and all(isinstance(layer, CPULayer) for layer in layers)

    def _fuse(self) -> None:
        if not self.stock:
            fuse(self.lm, table=self.table, weights=self.dtype)

    @torch.inference_mode()
    def _warm_up(self, width: int) -> None:
        """Run one token, so that nobody's first answer waits for kernels to compile.

        It takes seconds the first time on a machine. Writes a page that nobody holds yet.
        """
        if self.stock:
            return
        plans = self._planner.image([[0] for _ in self.groups], 1)
        embeds = torch.zeros(1, width, dtype=self.adapter.dtype, device=self.device)
        positions = torch.zeros(1, dtype=torch.long, device=self.device)
        self._decode(embeds, positions, plans)

    # -- images ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def see(self, image: ImageInput, pixels: Any, rank: int = 0) -> None:
        """Start looking at a whole image, which the runner does not know: once for its KV and for
        every context. `pixels`: what the pipeline made of it; `rank`: who looks."""
        if rank:
            return self._features.await_(image.digest, self.team.look(rank, image, pixels))
        self._features.put(image.digest, *self._start(lambda: self._look(image, pixels)))

    def _start(self, look: Callable[[], Features]) -> tuple[Features, Done]:
        return look(), Done()

    @torch.inference_mode()
    def look(self, image: ImageInput, pixels: Any) -> Features:
        """For another rank, beside what this one is told to do; on the host."""
        return self._look(image, pixels).on(torch.device("cpu"))

    def rehearse_look(self) -> None:
        """Compile what looking takes."""

    def _look(self, image: ImageInput, pixels: Any) -> Features:
        """What the model's tower makes of an image, alone, in its one shape."""
        if self.adapter.cross is not None:
            return Features(self.adapter.cross_states(pixels)[: image.num_tokens])
        if self.stock:
            assert image.token_ids is not None
            return self.adapter.look(image.token_ids, pixels)
        tokens: Tensor = self.vision_model.encode(pixels.to(self.device)).flatten(0, 1)
        return Features(tokens[: image.num_tokens].to(self.adapter.dtype))

    @torch.inference_mode()
    def encode(self, job: ImageJob) -> None:
        """Write the KV of an image that is or was looked at (`see`), by itself.

        Each image runs alone, in the same shape always: its KV is a function of the image only,
        to the last bit, whatever else waits.
        """
        image = job.image.whole
        features = self._features.get(image.digest)
        if self.adapter.cross is not None:
            return self._project(job, features.embeds)
        count = len(features.embeds)
        plans = self._planner.image(job.pages, count, job.regime)
        where, regimes = self._planner.image_rows(count, job.regime), None
        if self.stock:
            local = torch.arange(count) if image.positions is None else image.positions
            where = torch.as_tensor(local).to(self.device)
            if where.dim() < 2 and self.adapter.axes > 1:
                where = where.expand(self.adapter.axes, count)
            regimes = torch.full((count,), job.regime, device=self.device) if job.regime else None
        extra = self.adapter.extras([(0, features)], count)
        # Layers write into what they are given.
        self._decode(features.embeds.clone(), where, plans, regimes, extra)

    def _project(self, job: ImageJob, states: Tensor) -> None:
        """An image's keys and values, once for each layer that looks at images."""
        assert self.adapter.cross is not None
        index = torch.arange(len(states), device=self.device)
        size = self.vision[0].shape.page_size
        for layer, *new in self.adapter.cross.project(states):
            group, number = self._places[layer]
            pages = torch.tensor(job.pages[group], device=self.device)
            slots = slots_in(pages, index, size)
            write_kv(self.vision[group].layer(number), slots, *new)

    def knows(self, digest: bytes) -> bool:
        """Whether an image need not be looked at (again). May be asked on any thread."""
        return digest in self._features

    def has_seen(self, digest: bytes) -> bool:
        """Whether what is made of an image is there, so that nothing would wait for it."""
        return self._features.is_ready(digest)

    def touch(self, digest: bytes) -> None:
        """An image is in use, even if its KV is found and its features are not needed."""
        self._features.touch(digest)

    def trim(self) -> None:
        """Behind each step: what it has not used of images is kept up to `feature_bytes`."""
        self._features.trim()

    def shrink(self) -> None:
        """Give back what is kept only to save work."""
        self._features.clear()

    def forget(self) -> None:
        """Start anew with the same weights and the pools' memory: nothing of KV or images is known.

        For books that can no longer be trusted; what was captured stays, since no tensor moves.
        """
        for text, vision in zip(self.text, self.vision, strict=True):
            text.forget()
            vision.forget()
        self._features.clear()

    # -- steps ----------------------------------------------------------------------------------

    def listen(self, layers: Sequence[int], *, trees: bool = False) -> None:
        """From now on, a step leaves in `heard` what these layers give (`Taps`), and has drafts,
        `trees` among them."""
        self._taps.close()
        self._listen(layers)

    def _listen(self, layers: Sequence[int]) -> None:
        self._taps = Taps(self.adapter.decoder.layers, layers, self.adapter.hidden_size)
        self.heard: Heard = {}  # of the last step
        self.hears = True  # may be unset for steps of which nobody wants to know

    @torch.inference_mode()
    def run(self, batch: Batch, previous: Tensor | None = None) -> Logits | None:
        """Compute the batch's text and its images in context; None when nothing is to be sampled.

        `previous` [C] int64: the tokens of the step before, when they have not landed.
        """
        if not batch.chunks:
            return None
        self.heard = {}
        step_input = self._planner.step(batch.chunks, previous)
        embeds, extra = self._embed(step_input)
        how = step_input.positions, step_input.plans, step_input.regimes, extra
        joined = self._taps.join(self._decode(embeds, *how))
        if self.hears:
            self._taps.hear(self.heard, joined, zip(step_input.order, step_input.last, strict=True))
        hidden = self._taps.hidden(joined)
        rows = chosen_rows(step_input.order, step_input.last)
        if not rows:
            return None
        values = self.adapter.logits(hidden[torch.tensor(rows, device=self.device)]).float()
        return Logits([c for c in step_input.order if c.samples], values)

    def _embed(self, step_input: StepInput) -> tuple[Tensor, dict[str, Any]]:
        """Embeddings [T, hidden] of a step's rows, and what else the decoder is told."""
        embeds = self.adapter.embed(step_input.token_ids)
        images = []
        for first, placed in step_input.images:
            features = self._features.get(placed.image.digest).first(placed.image.num_tokens)
            embeds[first : first + len(features.embeds)] = features.embeds
            images.append((first, features))
        extra = self.adapter.extras(images, len(embeds))
        if self.adapter.cross is not None:
            extra |= self.adapter.cross.arguments(seen_rows(step_input.plans[-1], len(embeds)))
        return embeds, extra

    @followed
    def _decode(
        self,
        embeds: Tensor,
        positions: Tensor,
        plans: tuple[AttentionPlan, ...],
        regimes: Tensor | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Tensor:
        return self.adapter.decode(embeds, positions, self._step(plans), regimes, **(extra or {}))

    @followed
    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Pages of text, before a step."""
        copy_pages(self.text, copies)

    @followed
    def move(self, group: int, slots: Sequence[int]) -> None:
        """Tokens of text: where they stand, then where they go."""
        sources, targets = upload(slots, torch.long, self.device).view(2, -1)
        self.text[group].move(sources, targets)

    def _step(self, plans: tuple[AttentionPlan, ...]) -> attention.Step:
        parts = zip(plans, self.text, self.vision, strict=True)
        return attention.Step(tuple(attention.GroupStep(*part) for part in parts), self._places)


def _adapt(lm: Any, loaded: Loaded) -> Adapter:
    """Raises ValueError for a model that is no decoder as they are known here."""
    try:
        return Adapter(lm, loaded.rope_scaling)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{loaded.name} cannot be served ({type(lm).__name__}): {first_line(error)}"
        ) from error

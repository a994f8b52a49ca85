"""The model runner: a `Batch` in, logits out.

Owns the device, the fused model and both pools' tensors. Knows nothing of queues, text or sockets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmserve.cache.kv_pool import KVShape, TextKVPool, VisionKVPool
from mmserve.cache.layer_group import LayerGroup
from mmserve.config import CacheConfig, ModelConfig
from mmserve.engine.plan import Planner
from mmserve.kernels.chain import has_kernels
from mmserve.kernels.reference import AttentionPlan, rope_table
from mmserve.model import attention
from mmserve.model.cpu_layer import CPULayer
from mmserve.model.fuse import fuse
from mmserve.model.loader import LoadedModel
from mmserve.scheduler.batch import Batch, Chunk, ImageJob


class Logits(NamedTuple):
    """`values` [C, vocab], floats: the next token's logits of each sampling chunk, in order."""

    chunks: list[Chunk]
    values: Tensor


def resolve_dtype(name: str, device: torch.device) -> str:
    """`auto` is int8 on a CPU, bfloat16 on a GPU with our kernels, else float32.

    Raises ValueError.
    """
    known = ["float32"]
    if device.type == "cpu":
        known = ["int8", "float32"]
    elif has_kernels(device):
        known = ["bfloat16", "float32"]
    if name == "auto":
        return known[0]
    if name not in known:
        raise ValueError(f"dtype {name!r} is none of auto, {', '.join(known)} on {device.type}")
    return name


def _refuse_window(config: Any, max_model_len: int) -> None:
    """Every layer here reads the whole context. Raises ValueError."""
    window = getattr(config, "sliding_window", None)
    if window and window < max_model_len and getattr(config, "use_sliding_window", True):
        raise ValueError(
            f"the model's layers see {window} tokens at a time, which is not served yet; "
            f"set max_model_len to {window} or less"
        )


class ModelRunner:
    """Runs images and text of one step. Fuses `loaded.lm` in place."""

    # The step is this thread's own work, so one launched ahead would only delay the answers.
    overlaps = False

    def __init__(self, loaded: LoadedModel, cache: CacheConfig, *, dtype: str) -> None:
        self.lm: Any = loaded.lm
        self.vision_model = loaded.vision
        config = self.lm.config
        head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        self.device = next(self.lm.parameters()).device
        self.dtype = resolve_dtype(dtype, self.device)
        if self.dtype == "bfloat16":
            self.lm.to(torch.bfloat16)
        _refuse_window(config, loaded.spec.max_model_len)
        theta = config.rope_parameters["rope_theta"]
        self.table = rope_table(loaded.spec.max_model_len, head_dim, theta)
        self.table = self.table.to(self.device)
        shape = KVShape(
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            page_size=cache.page_size,
            dtype=next(self.lm.parameters()).dtype,
            device=self.device,
        )
        self.groups = (LayerGroup(tuple(range(config.num_hidden_layers))),)
        self._places = attention.places(self.groups)
        self._planner = Planner(self.groups, self.table, cache.page_size)
        # By layer group.
        self.text = (TextKVPool(shape, cache.text_bytes),)
        self.vision = (VisionKVPool(shape, cache.vision_bytes),)
        eos = config.eos_token_id
        self.eos_token_ids: list[int] = eos if isinstance(eos, list) else [eos]
        attention.register()
        self.lm.config._attn_implementation = attention.NAME
        self._fuse()
        self._warm_up(config.hidden_size)

    @property
    def deterministic(self) -> bool:
        """Whether a request's bits do not depend on what runs beside it."""
        return self.dtype == "int8" and all(isinstance(m, CPULayer) for m in self.lm.model.layers)

    def _fuse(self) -> None:
        fuse(self.lm, table=self.table, weights=self.dtype)

    @torch.inference_mode()
    def _warm_up(self, width: int) -> None:
        """Run one token, so that nobody's first answer waits for kernels to compile.

        It takes seconds the first time on a machine. Writes a page that nobody holds yet.
        """
        plans = self._planner.image([[0] for _ in self.groups], 1)
        embeds = torch.zeros(1, 1, width, dtype=self.vision[0].shape.dtype, device=self.device)
        positions = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        self._forward(embeds, positions, self._step(plans))

    @torch.inference_mode()
    def encode(self, job: ImageJob, pixels: Tensor) -> None:
        """Encode one image, uint8 [1, 3, H, W], and write its KV.

        Each image runs alone, in the same shape always: its KV is a function of the image only,
        to the last bit, whatever else waits.
        """
        embeds = self.vision_model.encode(pixels.to(self.device))  # [1, n, hidden]
        count = embeds.shape[1]
        plans = self._planner.image(job.pages, count)
        positions = torch.arange(count, device=self.device)[None]
        self._forward(embeds, positions, self._step(plans))

    @torch.inference_mode()
    def run(self, batch: Batch, previous: Tensor | None = None) -> Logits | None:
        """Compute the batch's text; None when nothing is to be sampled.

        `previous` [C] int64: the tokens of the step before, when they have not landed.
        """
        if not batch.chunks:
            return None
        step_input = self._planner.step(batch.chunks, previous)
        embeds = self.lm.get_input_embeddings()(step_input.token_ids)[None]
        step = self._step(step_input.plans)
        hidden = self._forward(embeds, step_input.positions[None], step)
        sampling = [i for i, c in enumerate(step_input.order) if c.samples]
        if not sampling:
            return None
        rows = step_input.last[torch.tensor(sampling, device=self.device)]
        values = self.lm.lm_head(hidden[0, rows]).float()
        return Logits([step_input.order[i] for i in sampling], values)

    def _step(self, plans: tuple[AttentionPlan, ...]) -> attention.Step:
        parts = zip(plans, self.text, self.vision, strict=True)
        return attention.Step(tuple(attention.GroupStep(*part) for part in parts), self._places)

    def _forward(self, embeds: Tensor, positions: Tensor, step: Any) -> Tensor:
        out = self.lm.model(
            inputs_embeds=embeds,
            position_ids=positions,
            attention_mask=None,
            use_cache=False,
            step=step,
        )
        hidden: Tensor = out.last_hidden_state
        return hidden


def build_runner(loaded: LoadedModel, cache: CacheConfig, model: ModelConfig) -> ModelRunner:
    """The runner of the model's device. Raises ValueError for what the device cannot do."""
    if has_kernels(loaded.device):
        from mmserve.engine.cuda_runner import CUDARunner  # imports Triton

        return CUDARunner(loaded, cache, dtype=model.dtype, deterministic=model.deterministic)
    runner = ModelRunner(loaded, cache, dtype=model.dtype)
    if model.deterministic and not runner.deterministic:
        raise ValueError("deterministic needs dtype int8 and Llama-style layers on this device")
    return runner

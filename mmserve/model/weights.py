"""Whatever `--model` names, ready to run: a native composition or a public checkpoint.

Owns the choice between the two, and loading a checkpoint's weights through transformers. What was
checked when it was opened is not checked again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from mmserve.config import ModelConfig
from mmserve.errors import first_line
from mmserve.model.checkpoint import Checkpoint, open_checkpoint
from mmserve.model.fetch import ModelUnavailableError
from mmserve.model.hub import is_native
from mmserve.model.loader import LoadedModel, load_model, resolve_device
from mmserve.model.shard import Split


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A model that is all transformers', images too; evaluation mode, on `device`."""

    lm: Any
    checkpoint: Checkpoint
    device: torch.device

    stock = True

    @property
    def name(self) -> str:
        return self.checkpoint.name

    @property
    def max_model_len(self) -> int:
        return self.checkpoint.max_model_len

    @property
    def rope_scaling(self) -> Mapping[str, Any] | None:
        return self.checkpoint.rope_scaling

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.checkpoint.eos_token_ids

    @property
    def tokenizer(self) -> tokenizers.Tokenizer:
        backend: tokenizers.Tokenizer = self.checkpoint.tokenizer.backend_tokenizer
        return backend


Loaded = LoadedModel | LoadedCheckpoint


def open_named(cfg: ModelConfig) -> Checkpoint:
    """The public checkpoint that `cfg` names, checked up to the first byte of weights.

    Raises as `load` does.
    """
    if cfg.image_max_tokens is not None:
        raise ValueError(
            "--image-max-tokens is not for public checkpoints, whose processors decide"
        )
    return open_checkpoint(
        cfg.model,
        max_model_len=cfg.max_model_len,
        rope_scaling=cfg.rope_scaling,
        processor_kwargs=cfg.processor_kwargs,
        chat_template=cfg.chat_template,
    )


def load(
    cfg: ModelConfig,
    pool_bytes: int = 0,
    checkpoint: Checkpoint | None = None,
    split: Split | None = None,
) -> Loaded:
    """Loads what `cfg` names; `pool_bytes` of KV must fit beside a checkpoint's weights.

    `checkpoint`: what `open_named` made of it, where that has been called. `split`: leaves of the
    language model what is wanted, on the host, before it goes to its device. Raises
    `ModelUnavailableError`, and `ValueError` for a configuration that does not fit.
    """
    if is_native(cfg.model):
        return load_model(cfg, split=split)
    device = resolve_device(cfg.device)
    half = device.type == "cuda" and cfg.dtype in ("auto", "bfloat16")
    dtype = torch.bfloat16 if half else torch.float32
    return load_checkpoint(checkpoint or open_named(cfg), dtype, device, pool_bytes, split)


def load_checkpoint(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    pool_bytes: int = 0,
    split: Split | None = None,
) -> LoadedCheckpoint:
    """Loads all weights, or none; see `load`. Raises `ModelUnavailableError`."""
    place = device if split is None else torch.device("cpu")
    checkpoint.require_memory(dtype, place, pool_bytes if place == device else 0)
    kind = AutoModelForImageTextToText if checkpoint.takes_images else AutoModelForCausalLM
    source = checkpoint.source
    extra = {"gguf_file": source.gguf} if source.gguf else {}
    bars = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        lm, report = kind.from_pretrained(
            source.folder,
            config=checkpoint.config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            device_map={"": place},  # shard by shard: the host need not hold all of them
            **extra,
        )
    except Exception as error:  # weights of other shapes, a dtype that a model does not take
        raise ModelUnavailableError(
            f"{checkpoint.name} cannot be loaded: {first_line(error)}"
        ) from error
    finally:
        if shown:
            bars.enable_progress_bar()
    if missing := sorted(report["missing_keys"]):
        raise ModelUnavailableError(
            f"{checkpoint.name} lacks {len(missing)} of its tensors, {missing[0]} among them"
        )
    lm.eval().requires_grad_(False)
    if split is not None:
        split(lm)
        lm.to(device)
    return LoadedCheckpoint(lm, checkpoint, device)

"""An engine from its configuration alone: the model is fetched, checked and loaded.

Owns the order of these, and the threads that a process computes with. Knows nothing of steps.
"""

from __future__ import annotations

import dataclasses

import numba
import torch

from mmserve.config import EngineConfig
from mmserve.engine.border import build_border
from mmserve.engine.engine import Engine
from mmserve.engine.model_runner import resolve_dtype
from mmserve.engine.ranks import parallel_engine
from mmserve.model.hub import is_native
from mmserve.model.loader import resolve_device
from mmserve.model.shard import Split
from mmserve.model.weights import Loaded, load, open_named


def build_engine(config: EngineConfig, kind: type[Engine] = Engine) -> Engine:
    """Load the model (fetching it the first time) and build an engine around it, of this `kind`
    where one process computes all of it.

    What can be refused before a public checkpoint's weights are read is refused then.
    """
    if config.model.num_threads is not None:
        torch.set_num_threads(config.model.num_threads)
    # The compiled kernels have threads of their own, as many as the machine has cores at most.
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
    model, pools = config.model, config.cache.text_bytes + config.cache.vision_bytes
    device, native = resolve_device(model.device), is_native(model.model)
    parallel = config.tensor_parallel_size > 1
    if parallel and model.dtype == "auto" and device.type == "cpu":  # 8-bit products are not split
        model = dataclasses.replace(model, dtype="float32")
        config = dataclasses.replace(config, model=model)
    dtype = resolve_dtype(model.dtype, device, stock=not native)
    if native:
        return parallel_engine(config, load_part) if parallel else kind(config, load(model))
    checkpoint = open_named(model)
    held = dtype + config.cache.formats
    border = build_border(checkpoint, config, dtype=held)
    if parallel:
        return parallel_engine(config, load_part, border)
    return kind(config, load(model, pools, checkpoint), border)


def load_part(config: EngineConfig, split: Split) -> Loaded:
    """The model that a configuration names, of which one rank computes a part."""
    pools = config.cache.text_bytes + config.cache.vision_bytes
    return load(config.model, pools, split=split)

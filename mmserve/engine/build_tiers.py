"""The tiers below an engine's pools, as the configuration says.

Owns the defaults that depend on the machine, and the first measurements. Knows nothing of requests.
"""

from __future__ import annotations

import logging
import os
import time
from typing import get_args

import torch

from mmserve.config import EngineConfig
from mmserve.engine.kv_objects import KVObjects
from mmserve.engine.kv_tiers import KVTiers
from mmserve.engine.model_runner import ModelRunner
from mmserve.engine.staging import Staging, refuse
from mmserve.handover.stages import Stages
from mmserve.handover.wire import Kind
from mmserve.metrics import Metrics
from mmserve.scheduler.scheduler import Scheduler
from mmserve.tiers.cost import Costs
from mmserve.tiers.disk import Folder
from mmserve.tiers.host_memory import host_memory
from mmserve.tiers.kv_object import Owner
from mmserve.tiers.object_store import ObjectStore
from mmserve.tiers.probe import PROBE_BYTES, disk_byte_s
from mmserve.tiers.stack import TierStack

logger = logging.getLogger(__name__)

HOST_SHARE = 8  # one part in so many of the machine's memory, beside a GPU


def build_tiers(
    whole: EngineConfig,
    owner: Owner,
    runner: ModelRunner,
    scheduler: Scheduler,
    metrics: Metrics,
    costs: Costs,
) -> KVTiers | None:
    """None where nothing is kept below the pools or comes from elsewhere, or no process has all of
    it. Raises `ObjectStoreError`, or `OSError` for a folder that cannot be used."""
    config, pinned = whole.tiers, runner.device.type == "cuda"
    if runner.team.ranks > 1:
        if config.folder is not None and config.disk_bytes:
            logger.warning("nothing is kept on disk: no rank has all of the KV")
        return None
    host_bytes = config.host_bytes
    if host_bytes is None:
        host_bytes = _memory() // HOST_SHARE if pinned else 0
    folder = None
    if config.folder is not None and config.disk_bytes:
        folder = Folder(config.folder, owner, pinned=pinned)
    store = ObjectStore(config.object_store) if config.object_store else None
    if not host_bytes and folder is None and store is None and not whole.stages:
        return None
    stack = TierStack(
        owner,
        metrics,
        host_bytes=host_bytes,
        disk_bytes=config.disk_bytes,
        folder=folder,
        store=store,
        pinned=pinned,
        faults=whole.faults,
    )
    costs.byte_s["host"] = _host_byte_s(runner.device)
    if folder is not None and (seconds := disk_byte_s(folder.path)) is not None:
        costs.byte_s["disk"] = seconds
    objects = KVObjects(owner, runner.text, runner.vision)
    tiers = KVTiers(stack, scheduler.holdings, objects, costs)
    if whole.stages:
        kinds: list[Kind] = [kind for kind in get_args(Kind) if getattr(whole.stages, kind)]
        refuse(kinds, scheduler)
        device = runner.device
        if device.type == "cuda":  # others' threads have another current one
            device = torch.device("cuda", torch.cuda.current_device())
        stages = Stages(whole.stages, owner, device, metrics)
        tiers.staging = Staging(stages, tiers.lifter, scheduler, costs, metrics)
    scheduler.lift = tiers.lifter.lift
    stack.make_ready(tiers.lifter.run_bytes)
    return tiers


def _memory() -> int:
    """Bytes of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _host_byte_s(device: torch.device) -> float:
    """Seconds that a byte takes from host memory to the device's."""
    source = host_memory(PROBE_BYTES, pinned=device.type == "cuda").zero_()
    target = torch.empty_like(source, device=device)
    for _ in range(2):  # the first one also finds its way
        started = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return (time.perf_counter() - started) / PROBE_BYTES

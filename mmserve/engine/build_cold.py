"""The store of cold images beside a runner's vision pool, as the configuration says.

Owns what cannot have one. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable

from mmserve.cache.cold_images import ColdImages, Rung
from mmserve.config import WHOLE_PAGE, EngineConfig
from mmserve.engine.cold_kv import ColdKV
from mmserve.engine.model_runner import ModelRunner
from mmserve.kernels.kv_formats import FORMATS, PLAIN
from mmserve.metrics import Metrics
from mmserve.scheduler.scheduler import Scheduler
from mmserve.sequence import Sequence
from mmserve.tiers.cost import Costs


def build_cold(
    config: EngineConfig,
    runner: ModelRunner,
    scheduler: Scheduler,
    metrics: Metrics,
    costs: Costs,
    tier_of: Callable[[bytes], str | None],
) -> ColdKV | None:
    """None where images are to be as computed, or gone. Raises ValueError for what cannot be."""
    names = config.cache.cold_formats
    if not names:
        return None
    holdings = scheduler.holdings
    groups = [runner.groups[g] for g in holdings.image_groups]
    if runner.in_context or runner.sight.whole_prompt:
        raise ValueError("images that see what stands before them cannot step down")
    if any(group.window is not None for group in groups):
        raise ValueError("images cannot step down where layers read them through a window")
    if config.model.deterministic:
        raise ValueError("deterministic: which images step down depends on what else is asked")
    for name in names:
        for group in groups:
            dim = runner.adapter.layers[group.layers[0]].head_dim
            if dim % FORMATS[name].parts:
                raise ValueError(f"heads of {dim} dimensions cannot be held in {name}")
    skipped = [group.layers[0] in config.cache.skip_layers for group in groups]
    rungs = [Rung(name, tuple(PLAIN if s else FORMATS[name] for s in skipped)) for name in names]
    images = ColdImages(rungs, config.cache.cold_bytes, WHOLE_PAGE)
    cold = ColdKV(images, holdings, runner.vision, costs, metrics, tier_of)
    from_tiers = scheduler.lift

    def lift(seq: Sequence) -> bool:
        cold.choose(seq)
        return from_tiers(seq) and cold.lift(seq)

    scheduler.lift = lift
    return cold

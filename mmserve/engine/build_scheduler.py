"""The scheduler of a runner's pools.

Owns which pages its prefix cache covers. Knows nothing of requests or steps.
"""

from __future__ import annotations

from mmserve.cache.page_pool import PagePool
from mmserve.cache.radix_cache import RadixCache
from mmserve.config import EngineConfig
from mmserve.engine.model_runner import ModelRunner
from mmserve.scheduler.scheduler import Scheduler


def build_scheduler(config: EngineConfig, runner: ModelRunner, max_model_len: int) -> Scheduler:
    """Its books are those of the pools."""
    groups = runner.groups
    text = [pool.pages for pool in runner.text]
    size = config.cache.page_size
    readers = [(pages, group) for pages, group in zip(text, groups, strict=True) if group.text]
    radix = None
    if config.cache.prefix_caching:
        windowed = [group.window is not None for _, group in readers]
        radix = RadixCache([pages for pages, _ in readers], size, windowed)
    return Scheduler(
        config.scheduler,
        groups=groups,
        text=text,
        vision=[pool.index for pool in runner.vision],
        radix=radix,
        page_size=size,
        max_model_len=max_model_len,
        in_context=runner.in_context,
        head=runner.mode.head,
        whole_prompts=runner.sight.whole_prompt,
        residual=PagePool(runner.num_open) if runner.num_open else None,
    )

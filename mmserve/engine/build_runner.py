"""The runner of a model's device.

Owns the choice. Knows nothing of steps.
"""

from __future__ import annotations

from mmserve.config import EngineConfig
from mmserve.engine.model_runner import ModelRunner
from mmserve.engine.team import Team
from mmserve.kernels.chain import has_kernels
from mmserve.model.weights import Loaded


def build_runner(loaded: Loaded, config: EngineConfig, team: Team | None = None) -> ModelRunner:
    """`team`: with whom the model is computed. Raises ValueError for what the device cannot do."""
    arguments = loaded, config.cache, config.model, config.scheduler, team
    if has_kernels(loaded.device):
        from mmserve.engine.cuda_runner import CUDARunner  # imports Triton

        return CUDARunner(*arguments)
    runner = ModelRunner(*arguments)
    if config.model.deterministic and not runner.deterministic:
        raise ValueError("deterministic needs dtype int8 and Llama-style layers on this device")
    return runner

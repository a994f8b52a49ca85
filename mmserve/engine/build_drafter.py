"""The drafter that a configuration names.

Owns the choice. Knows nothing of steps or sequences.
"""

from __future__ import annotations

from mmserve.config import SpecConfig
from mmserve.spec.drafter import Drafter


def build_drafter(config: SpecConfig) -> Drafter | None:
    """None: no speculation."""
    return None

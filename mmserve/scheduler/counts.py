"""What the scheduler counts of its own work.

Owns the counts; knows nothing of how they are shown.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counts:
    """What happened since the counts were last taken."""

    preemptions: int = 0
    prefix_queries: int = 0  # text tokens
    prefix_hits: int = 0  # text tokens
    image_queries: int = 0  # images
    image_hits: int = 0  # images

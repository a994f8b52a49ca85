"""How a step's attention tables are run: how many programs, how wide, joined how.

Owns the rule that makes few different launches of many different steps, so that few have to be
captured. No torch and no Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mmserve.kernels.work import WorkTables

PARTS_AT_ONCE = 16  # partial results that are joined together
PROGRAMS_PER_PROCESSOR = 16


class Launch(NamedTuple):
    """Programs for small and for large items (0: there are none of the kind), how many partial
    results are joined at a time (0: no row has any; 1: strictly one after the other), the rows of
    large items' tiles (some sets' items may fill less), and whether the small items are too few to
    fill the device, so that each should be quick; `trees`: whether any row is of a draft tree;
    programs for small items over a residual."""

    small: int
    large: int
    merge: int
    tile_rows: int
    few: bool = False
    trees: bool = False
    newest: int = 0

    @classmethod
    def of(
        cls,
        sets: Sequence[WorkTables],
        kv_heads: int,
        processors: int,
        *,
        deterministic: bool = False,
    ) -> Launch:
        """The one launch that serves every set of a step on a device of so many processors.

        `deterministic`: nothing that bits depend on follows from how much work there is.
        """
        small, large = max(s.small for s in sets), max(s.large for s in sets)
        newest = max(s.newest for s in sets)

        def programs(items: int) -> int:
            if not items:
                return 0
            full = items * kv_heads > processors
            return processors * PROGRAMS_PER_PROCESSOR if full else processors

        merges = small + newest + max(s.num_slots for s in sets) > 0
        return cls(
            programs(small),
            programs(large),
            (1 if deterministic else PARTS_AT_ONCE) if merges else 0,
            max(s.tile_rows for s in sets),
            small * kv_heads <= processors and not deterministic,
            any(s.trees for s in sets),
            programs(newest),
        )

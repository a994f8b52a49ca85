"""How a budget of bytes is shared between the pools of a model's layer groups.

Owns the sizes only. No torch; knows nothing of pages' contents. A page is one of a single group: so
many tokens in all of its layers, `page_bytes` by group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mmserve.cache.layer_group import LayerGroup


def text_budgets(
    groups: Sequence[LayerGroup],
    page_bytes: Sequence[int],
    num_bytes: int,
    *,
    page_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> tuple[int, ...]:
    """Bytes of each group's text pool, whole pages, together at most `num_bytes`.

    Every group gets pages for equally many tokens, but a window no more than it can use: twice
    what `max_num_seqs` sequences read and write in one step, the second half for prefixes that
    wait to be found again. What windows leave goes to the groups that see everything; where there
    are none, windows share it all. A group without text gets nothing.
    """
    endless = any(group.text and group.window is None for group in groups)

    def most(group: LayerGroup) -> int | None:
        if not group.text or group.window is None or not endless:
            return None if group.text else 0
        tokens = 2 * max_num_seqs * (group.window + max_num_batched_tokens)
        return -(-tokens // page_size)

    return _share(groups, page_bytes, num_bytes, most)


def vision_budgets(
    groups: Sequence[LayerGroup], page_bytes: Sequence[int], num_bytes: int
) -> tuple[int, ...]:
    """Bytes of each group's vision pool: pages for equally many tokens where there are images."""
    return _share(groups, page_bytes, num_bytes, lambda group: None if group.images else 0)


def _share(
    groups: Sequence[LayerGroup],
    page_bytes: Sequence[int],
    num_bytes: int,
    most: Callable[[LayerGroup], int | None],
) -> tuple[int, ...]:
    """`most`: the pages a group gets at most, None: any number."""
    limits = [most(group) for group in groups]
    pages = [0] * len(groups)
    open_groups = set(range(len(groups)))
    while open_groups:
        fixed = sum(pages[g] * page_bytes[g] for g in range(len(groups)) if g not in open_groups)
        equal = max(num_bytes - fixed, 0) // sum(page_bytes[g] for g in open_groups)
        full = {g for g in open_groups if (limit := limits[g]) is not None and limit <= equal}
        for g in full or open_groups:
            limit = limits[g]
            pages[g] = equal if limit is None else min(equal, limit)
        open_groups = open_groups - full if full else set()
    return tuple(n * size for n, size in zip(pages, page_bytes, strict=True))

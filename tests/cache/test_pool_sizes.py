"""How a budget is shared between layer groups: worked cases, and what holds for any."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mmserve.cache.layer_group import LayerGroup
from mmserve.cache.pool_sizes import text_budgets, vision_budgets

PAGE = 16
FULL = LayerGroup((0,))
WINDOW = LayerGroup((1, 2), window=64)
SELF, CROSS = LayerGroup((0, 1), images=False), LayerGroup((2,), text=False)


def tokens(groups: tuple[LayerGroup, ...], token_bytes: tuple[int, ...], budget: int) -> list[int]:
    """Of each group's text pool, for 2 sequences and steps of 32 tokens."""
    pages = [PAGE * b for b in token_bytes]
    sizes = text_budgets(
        groups, pages, budget, page_size=PAGE, max_num_seqs=2, max_num_batched_tokens=32
    )
    return [size // b for size, b in zip(sizes, token_bytes, strict=True)]


def test_one_group_gets_it_all_window_or_not() -> None:
    assert tokens((FULL,), (10,), 160_000) == [16_000]
    assert tokens((WINDOW,), (10,), 160_000) == [16_000]


def test_a_small_budget_is_shared_evenly_and_a_big_one_is_not_wasted_on_windows() -> None:
    assert tokens((FULL, WINDOW), (10, 50), 60 * 320) == [320, 320]
    most = 2 * 2 * (64 + 32)
    assert tokens((FULL, WINDOW), (10, 50), 60 * most) == [most, most]
    assert tokens((FULL, WINDOW), (10, 50), 50 * most + 10 * 16_000) == [16_000, most]


def test_two_windows_each_get_what_they_can_use() -> None:
    wide = LayerGroup((3,), window=640)
    budget = 10 * 32_000 + 20 * 2 * 2 * (64 + 32) + 30 * 2 * 2 * (640 + 32)
    assert tokens((FULL, WINDOW, wide), (10, 20, 30), budget) == [32_000, 384, 2688]


def test_a_group_without_text_or_without_images_gets_nothing_of_them() -> None:
    assert tokens((SELF, CROSS), (20, 10), 20 * 320) == [320, 0]
    assert vision_budgets((SELF, CROSS), (320, 160), 1600) == (0, 1600)


def test_every_group_with_images_holds_equally_many() -> None:
    assert vision_budgets((FULL, WINDOW), (160, 800), 10_000) == (1600, 8000)


GROUPS = st.builds(LayerGroup, st.just((0,)), st.sampled_from([None, None, 8, 64, 640]))


@given(
    st.lists(st.tuples(GROUPS, st.integers(1, 50)), min_size=1, max_size=4), st.integers(0, 10**7)
)
def test_no_budget_is_exceeded_and_none_is_left_that_somebody_could_use(
    drawn: list[tuple[LayerGroup, int]], budget: int
) -> None:
    groups, sizes = (tuple(part) for part in zip(*drawn, strict=True))
    found = tokens(groups, sizes, budget)
    spent = sum(n * size for n, size in zip(found, sizes, strict=True))
    assert spent <= budget
    open_groups = [
        size
        for group, n, size in zip(groups, found, sizes, strict=True)
        if group.window is None or n == max(found)
    ]
    assert budget - spent < PAGE * sum(open_groups)

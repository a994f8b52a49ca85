"""After a draft was checked, text reads what is right of it and nothing else has changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from mmserve.cache.kv_pool import KVShape, TextKVPool
from mmserve.engine.kept_paths import Keeping, KeptPath

SHAPE = KVShape(2, 3, 2, 4, torch.float32, torch.device("cpu"))


def pool(pages: int) -> TextKVPool:
    made = TextKVPool(SHAPE, pages * SHAPE.page_bytes)
    made.tensor[:] = torch.arange(made.tensor.numel()).view(made.tensor.shape)
    return made


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.sets(st.integers(0, 14), max_size=6).map(sorted)),
        min_size=1,
        max_size=3,
    ),
    st.permutations(range(18)),
)
def test_right_paths_of_several_sequences_follow_what_was_known(
    drafts: list[tuple[int, list[int]]], pages: list[int]
) -> None:
    pools = [pool(18), pool(18), pool(1)]  # one group's layers read no text
    before = [each.tensor.clone() for each in pools]
    tables = [pages[6 * n : 6 * n + 6] for n in range(len(drafts))]
    # The groups' pages differ.
    kept = [
        KeptPath([table, table[::-1], []], known, path)
        for table, (known, path) in zip(tables, drafts, strict=True)
    ]
    wanted = [tensor.clone() for tensor in before]
    for of in kept:
        for group, table in enumerate(of.tables[:2]):
            for n, number in enumerate(of.path):
                places = [(table[t // 4], t % 4) for t in (of.known + n, of.known + number)]
                (page, at), (page_from, at_from) = places
                wanted[group][:, :, :, page, at] = before[group][:, :, :, page_from, at_from]

    def move(group: int, slots: Sequence[int]) -> None:
        pools[group].move(*torch.tensor(slots).view(2, -1))

    keeping = Keeping(pools, move)
    for of in kept:
        keeping.add(of)
    keeping.settle()
    keeping.settle()  # of which nothing is left
    for each, right in zip(pools, wanted, strict=True):
        assert torch.equal(each.tensor, right)


def test_a_chains_tokens_stay_where_they_are() -> None:
    assert not KeptPath([[0]], 3, [0, 1, 2]).moves
    assert KeptPath([[0]], 3, [0, 2]).moves == [(5, 4)]

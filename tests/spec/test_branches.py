"""Trees that grow token by token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mmserve.spec.branches import ROOT, Branches
from mmserve.spec.draft import Draft


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=12), st.integers(1, 9)
)
def test_chains_that_begin_alike_share_their_beginning(chains: list[list[int]], most: int) -> None:
    branches, paths = Branches(most), set()
    for chain in chains:
        parent = ROOT
        for i, token in enumerate(chain):
            number = branches.add(parent, token)
            if number is None:
                break
            parent = number
            paths.add(tuple(chain[: i + 1]))
    draft = branches.draft()
    assert len(branches) == len(paths) <= most
    assert (draft is None) == (not chains)
    if draft:
        found = set()
        for i, token in enumerate(draft.tokens):
            path = [token]
            while (i := draft.parents[i]) >= 0:
                path.insert(0, draft.tokens[i])
            found.add(tuple(path))
        assert found == paths


def test_a_full_tree_takes_no_more_but_knows_what_it_has() -> None:
    branches = Branches(1)
    assert branches.add(ROOT, 5) == 0
    assert branches.add(0, 6) is None and branches.add(ROOT, 5) == 0
    assert branches.draft() == Draft((5,), (ROOT,))

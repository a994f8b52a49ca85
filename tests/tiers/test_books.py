"""The book of a tier: never over its budget, the longest unused leaves first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mmserve.tiers.books import Ledger

NAMES = [bytes([n]) for n in range(6)]
OPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "touch", "remove"]), st.sampled_from(NAMES), st.integers(0, 12)
    )
)


@given(budget=st.integers(0, 20), ops=OPS)
def test_the_budget_is_never_exceeded_and_the_longest_unused_leaves_first(
    budget: int, ops: list[tuple[str, bytes, int]]
) -> None:
    ledger = Ledger(budget)
    model: list[tuple[bytes, int]] = []  # least recently used first
    for op, name, size in ops:
        held = dict(model)
        if op == "add" and name not in held:
            gone = ledger.add(name, size)
            if size > budget:
                assert gone == [name]
            else:
                expected = []
                while sum(n for _, n in model) + size > budget:
                    expected.append(model.pop(0)[0])
                model.append((name, size))
                assert gone == expected
        elif op == "touch":
            ledger.touch(name)
            model.sort(key=lambda entry: entry[0] == name)
        elif op == "remove":
            assert ledger.remove(name) == held.get(name, 0)
            model = [entry for entry in model if entry[0] != name]
        ledger.check_invariants()
        assert list(ledger) == [n for n, _ in model] and len(ledger) == len(model)


def test_what_is_larger_than_the_budget_is_turned_away_and_nothing_else_leaves() -> None:
    ledger = Ledger(10)
    ledger.add(b"a", 6)
    assert ledger.add(b"b", 11) == [b"b"]
    assert b"a" in ledger and b"b" not in ledger and ledger.used == 6

"""Names of objects: equal prefixes of one model, equal names, and no others."""

from __future__ import annotations

from collections.abc import Hashable

from hypothesis import given
from hypothesis import strategies as st

from mmserve.tiers.names import image_name, run_names

MARKED = st.tuples(st.sampled_from([b"a", b"ab", b""]), st.integers(0, 2))
KEYS = st.lists(st.one_of(st.integers(0, 2), MARKED), max_size=14)
RUN = 4


@given(one=KEYS, two=KEYS)
def test_names_are_equal_as_far_as_whole_runs_are(one: list[Hashable], two: list[Hashable]) -> None:
    names = run_names(b"s", one, RUN), run_names(b"s", two, RUN)
    assert list(map(len, names)) == [len(one) // RUN, len(two) // RUN]
    for n, (a, b) in enumerate(zip(*names, strict=False)):
        end = (n + 1) * RUN
        assert (a == b) == (one[:end] == two[:end])


def test_a_run_s_name_does_not_depend_on_what_follows() -> None:
    keys: list[Hashable] = list(range(20))
    assert run_names(b"s", keys, RUN)[:3] == run_names(b"s", keys[:13], RUN)


def test_what_stands_before_a_token_cannot_pass_for_other_names() -> None:
    pairs = [(b"ab", 0), (b"a", b"b", 0), (b"b", 0), 0]
    names = {run_names(b"s", [key, 1, 2, 3], RUN)[0] for key in pairs}
    names |= {run_names(b"s", [0, key, 2, 3], RUN)[0] for key in pairs[:3]}
    assert len(names) == 7


def test_other_models_have_other_names() -> None:
    assert run_names(b"s", [1, 2, 3, 4], RUN) != run_names(b"t", [1, 2, 3, 4], RUN)
    assert image_name(b"s", b"k") != image_name(b"t", b"k") != image_name(b"t", b"l")

"""The ladder of cold images: it never takes more than it may, and nothing depends on the way."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.cache.cold_images import ColdImage, ColdImages, Rung
from mmserve.kernels.kv_formats import FORMATS, Pages
from mmserve.kernels.reference import read_pages

HEADS, DIM, SIZE = 4, 16, 16
NAMES = ("int8", "int4", "int2")


def image(seed: int, num_tokens: int) -> ColdImage:
    random = torch.Generator().manual_seed(seed)
    shape = (HEADS, -(-num_tokens // SIZE), SIZE, DIM)
    k, v = (torch.randn(shape, generator=random) for _ in range(2))
    return ColdImage(num_tokens, (Pages(k, v),))


def store(num_bytes: int) -> ColdImages:
    return ColdImages([Rung(name, (FORMATS[name],)) for name in NAMES], num_bytes, 64)


def values(found: ColdImage) -> torch.Tensor:
    (part,) = found.parts
    tokens = torch.stack(read_pages(part, torch.arange(part.k.shape[1])[None]))
    return tokens[..., : found.num_tokens, :]


def stepped(seed: int, num_tokens: int, name: str) -> torch.Tensor:
    """One step after another, by the formats' own definition, in a store of its own."""
    own = store(1 << 30)
    own.put(b"", image(seed, num_tokens))
    for _ in range(NAMES.index(name)):
        own._give_way()
    found = own.get(b"", name)
    assert found is not None
    return values(found)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["put", "get", "drop"])), max_size=20),
    st.integers(0, 40_000),
)
def test_it_holds_what_it_may_and_each_image_is_the_same_on_its_rung_whatever_its_way(
    calls: list[tuple[int, str]], num_bytes: int
) -> None:
    cold = store(num_bytes)
    for seed, call in calls:
        key, tokens = bytes([seed]), 5 + 13 * seed
        known = cold.rung(key)
        if call == "put":
            cold.put(key, image(seed, tokens))
        elif call == "drop":
            assert cold.drop(key) == (known is not None)
            assert cold.rung(key) is None
        elif (name := cold.rung(key)) is not None:
            found = cold.get(key, name)
            assert found is not None and torch.equal(values(found), stepped(seed, tokens, name))
        cold.check_invariants()
        assert sum(cold.count(name)[1] for name in NAMES) == cold.used <= num_bytes


def test_all_step_down_before_any_goes_and_the_one_used_longest_ago_first() -> None:
    cold = store(1 << 30)
    for seed in range(3):
        cold.put(bytes([seed]), image(seed, 64))
    cold.get(b"\0", "int8")
    whole = cold.used
    order = []
    for _ in range(9):
        before = {bytes([s]): cold.rung(bytes([s])) for s in range(3)}
        cold._give_way()
        order += [k[0] for k, name in before.items() if cold.rung(k) != name]
    assert order == [1, 2, 0] * 3 and cold.used == 0 < whole


def test_an_image_that_comes_again_begins_anew() -> None:
    cold = store(1 << 30)
    cold.put(b"a", image(1, 20))
    cold._give_way()
    assert cold.rung(b"a") == "int4"
    cold.put(b"a", image(1, 20))
    assert cold.rung(b"a") == "int8" and cold.get(b"a", "int4") is None

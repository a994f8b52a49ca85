"""Which replica a request goes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from mmserve.deploy.asked import Asked
from mmserve.deploy.directory import Directory, Facts

NAMES = ("a", "b", "c")
EMPTY: Mapping[str, float] = {}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def known(
    *unready: str, clock: Clock | None = None, loads: Mapping[str, float] = EMPTY
) -> Directory:
    clock = clock or Clock()
    directory = Directory(clock)
    directory.learn(
        Facts(name, f"http://{name}", name not in unready, loads.get(name, 0.0), clock.now)
        for name in NAMES
    )
    return directory


def first(directory: Directory, asked: Asked, *, reads: bool = False) -> str:
    return directory.candidates(asked, reads=reads)[0].name


def picture(number: int) -> Asked:
    return Asked(digests=(f"{number:064x}",))


def test_who_keeps_the_conversation_has_it() -> None:
    assert first(known(), Asked(home="b", digests=("x",))) == "b"


def test_one_that_drains_is_asked_for_what_it_keeps_only() -> None:
    directory = known("b")
    assert first(directory, Asked(home="b"), reads=True) == "b"
    assert first(directory, Asked(home="b")) != "b"
    assert [each.name for each in directory.calmest()] == ["a", "c"]


def test_an_unreachable_replica_is_passed_over_until_it_speaks_and_a_missing_one_is_gone() -> None:
    clock = Clock()
    directory = known(clock=clock)
    directory.failed("b")
    assert {each.name for each in directory.ready()} == {"a", "c"}
    clock.now += 1
    directory.learn(Facts(name, "", True, 0.0, clock.now) for name in NAMES)
    assert len(directory.ready()) == 3
    directory.learn([Facts("c", "", True, 0.0, clock.now)])
    assert [each.name for each in directory.ready()] == ["c"]


def test_pictures_are_spread_and_each_stays() -> None:
    directory = known()
    homes = [first(directory, picture(number)) for number in range(300)]
    assert homes == [first(directory, picture(number)) for number in range(300)]
    assert min(Counter(homes).values()) > 60


def test_several_pictures_go_where_most_of_them_were_seen() -> None:
    directory = known()
    directory.remember(Asked(digests=("x",)), "a")
    directory.remember(Asked(digests=("y", "z")), "c")
    assert first(directory, Asked(digests=("x", "y", "z"))) == "c"


def test_what_was_seen_stays_there_while_load_is_bearable() -> None:
    directory = known(loads={"a": 3.0})
    directory.remember(picture(1), "a")
    assert first(directory, picture(1)) == "a"
    directory = known(loads={"a": 50.0})
    directory.remember(picture(1), "a")
    assert first(directory, picture(1)) != "a"


def test_without_a_picture_a_conversation_goes_by_what_its_client_calls_it() -> None:
    directory = known()
    by_name = {first(directory, Asked(session="s", prefix=str(n))) for n in range(20)}
    assert len(by_name) == 1
    assert len({first(directory, Asked(prefix=str(n))) for n in range(20)}) == 3


@given(
    st.dictionaries(st.sampled_from(NAMES), st.floats(0, 1e6)),
    st.lists(st.text(max_size=3), max_size=4),
    st.sampled_from((None, *NAMES, "gone")),
)
def test_everybody_ready_is_asked_at_most_once(
    loads: dict[str, float], digests: list[str], home: str | None
) -> None:
    directory = known(loads=loads)
    found = directory.candidates(Asked(home=home, digests=tuple(digests)))
    assert sorted(each.name for each in found) == list(NAMES)


def test_nobody_is_asked_where_nobody_is() -> None:
    assert Directory().candidates(picture(1)) == []

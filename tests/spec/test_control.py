"""Drafts where they pay, and only there: whole runs on machines whose costs are made up."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.spec.control import GAIN, LONGEST_WAIT, RESTS, Control, Kind, Outcome
from mmserve.spec.costs import ENOUGH


@dataclass
class Machine:
    """Steps whose seconds are functions: plain by sequences, checked by rows, drafting by tokens
    asked for. `right`: how likely a sequence's drafted token is accepted."""

    control: Control
    plain: Callable[[int], float]
    checked: Callable[[int], float]
    drafting: Callable[[int], float] = lambda tokens: 0.0
    noise: float = 0.0
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def run(
        self,
        steps: int,
        ids: Sequence[str],
        right: Callable[[str], float],
        kind: Kind = Kind.TEXT,
    ) -> tuple[float, list[dict[str, int]]]:
        """Times as many tokens a second as without drafts, and each step's plan."""
        seconds = alone = 0.0
        plans = []
        for _ in range(steps):
            plan = self.control.plan([(id, kind) for id in ids])
            outcomes = [self._outcome(id, wanted, right(id)) for id, wanted in plan.items()]
            drafting = self.drafting(sum(plan.values())) if plan else 0.0
            rows = len(ids) + sum(plan.values())
            step = self.checked(rows) if plan else self.plain(rows)
            step *= 1 + self.random.uniform(0, self.noise)
            self.control.stepped(step + drafting, len(ids), outcomes, drafting)
            seconds += step + drafting
            tokens = len(ids) + sum(outcome.accepted for outcome in outcomes)
            alone += self.plain(len(ids)) * (1 + self.noise / 2) * tokens / len(ids)
            plans.append(plan)
        return alone / seconds, plans

    def _outcome(self, id: str, wanted: int, right: float) -> Outcome:
        accepted = 0
        while accepted < wanted and self.random.random() < right:
            accepted += 1
        return Outcome(id, wanted, wanted, accepted)


def gpu(most: int = 8) -> Machine:
    """Reading the weights takes most of a step; with drafts, the host's work stands beside it."""
    return Machine(Control(most), lambda n: 2.5 + 0.02 * n, lambda n: 3.2 + 0.025 * n, noise=0.04)


def ids(count: int) -> list[str]:
    return [str(i) for i in range(count)]


def drafted(plans: list[dict[str, int]]) -> float:
    return sum(map(bool, plans)) / len(plans)


def test_the_first_steps_are_plain_so_that_there_is_something_to_compare_with() -> None:
    _, plans = gpu().run(ENOUGH + 1, ids(1), lambda id: 1.0)
    assert not any(plans[:ENOUGH]) and plans[ENOUGH]


@given(st.integers(1, 32), st.integers(1, 8))
@settings(deadline=None, max_examples=20)
def test_where_all_are_right_and_rows_are_free_drafts_become_as_long_as_they_can(
    most: int, count: int
) -> None:
    machine = Machine(Control(most), lambda n: 1.0, lambda n: 1.0)
    gain, plans = machine.run(300, ids(count), lambda id: 1.0)
    assert plans[-1] == dict.fromkeys(ids(count), most)
    assert gain > 1 + 0.8 * most


@given(st.integers(1, 64), st.floats(0, 0.9))
@settings(deadline=None, max_examples=20)
def test_where_each_row_costs_as_much_as_a_sequence_next_to_nothing_is_lost(
    count: int, right: float
) -> None:
    machine = Machine(Control(8), lambda n: 1.0 * n, lambda n: 1.0 * n)
    gain, plans = machine.run(1000, ids(count), lambda id: right)
    assert gain > 0.985 and drafted(plans) < 0.05


@given(st.sampled_from([16, 32, 64]), st.floats(0, 1))
@settings(deadline=None, max_examples=20)
def test_a_large_batch_loses_less_than_one_percent(count: int, right: float) -> None:
    machine = Machine(
        Control(8), lambda n: 6 + 0.02 * n, lambda n: 7 + 0.06 * n, lambda n: 0.02 * n
    )
    gain, _ = machine.run(1000, ids(count), lambda id: right)
    assert gain > 0.99


def test_a_crowd_that_comes_and_goes_is_not_tried_anew_with_each_who_comes() -> None:
    """64 sequences of 20 steps each: somebody new every third of a step."""
    machine = Machine(Control(8), lambda n: 2.5, lambda n: 5.0)
    plans = 0
    for step in range(600):
        contexts = [(str(n), Kind.TEXT) for n in range(3 * step, 3 * step + 64)]
        plan = machine.control.plan(contexts)
        outcomes = [Outcome(id, wanted, wanted, 0) for id, wanted in plan.items()]
        machine.control.stepped(5.0 if plan else 2.5, 64, outcomes)
        for gone in range(3 * step, 3 * step + 3):
            machine.control.forget(str(gone))
        plans += bool(plan)
    assert 0 < plans < 8


def test_wrong_guesses_switch_drafts_off_and_right_ones_on_again() -> None:
    machine = gpu()
    gain, plans = machine.run(500, ids(1), lambda id: 0.9)
    assert gain > 3 and drafted(plans) > 0.9
    _, plans = machine.run(50, ids(1), lambda id: 0.0)
    gain, plans = machine.run(2000, ids(1), lambda id: 0.0)
    assert gain > 0.98 and drafted(plans) < 0.05
    assert any(machine.run(3 * LONGEST_WAIT, ids(1), lambda id: 0.9)[1])
    assert drafted(machine.run(500, ids(1), lambda id: 0.9)[1]) > 0.9


def test_drafts_whose_making_takes_too_long_are_not_made() -> None:
    machine = gpu()
    machine.drafting = lambda tokens: 1.0 * tokens
    assert drafted(machine.run(1000, ids(1), lambda id: 0.5)[1]) < 0.05
    machine = gpu()
    machine.drafting = lambda tokens: 0.1 * tokens
    assert drafted(machine.run(1000, ids(1), lambda id: 0.5)[1]) > 0.7


def test_a_batch_that_drafts_leaves_out_the_sequences_that_guess_badly() -> None:
    machine = Machine(Control(16), lambda n: 2.5, lambda n: 2.5 + 0.2 * n)
    _, plans = machine.run(600, ids(4), lambda id: 0.95 if id < "2" else 0.02)
    lengths = {id: sum(plan.get(id, 0) for plan in plans[100:]) for id in ids(4)}
    assert min(lengths["0"], lengths["1"]) > 20 * max(lengths["2"], lengths["3"])


def test_a_sequence_that_guesses_badly_is_asked_again_now_and_then() -> None:
    machine = gpu(16)
    machine.run(300, ids(2), lambda id: 0.95 if id == "0" else 0.0)
    machine.run(2 * LONGEST_WAIT, ids(2), lambda id: 0.95)
    plan = machine.run(1, ids(2), lambda id: 0.95)[1][0]
    assert min(plan["0"], plan["1"]) > 4


def test_a_new_sequence_is_tried_also_where_drafts_are_off() -> None:
    machine = gpu()
    machine.run(1000, ["old"], lambda id: 0.0)
    _, plans = machine.run(8, ["new"], lambda id: 1.0)
    assert sum(map(bool, plans)) >= 6


def test_one_step_that_took_long_changes_nothing() -> None:
    machine = gpu()
    machine.run(100, ids(1), lambda id: 0.9)
    machine.control.stepped(1e6, 1, [Outcome("0", 8, 8, 8)])
    assert drafted(machine.run(100, ids(1), lambda id: 0.9)[1]) > 0.9


def test_a_good_stretch_gets_long_drafts_where_they_mostly_have_to_be_short() -> None:
    """Two or three tokens are right at most; then all are, for a few steps."""
    control = Control(16)
    for _ in range(ENOUGH):
        control.stepped(1.0, 1)

    def step(reach: int) -> int:
        wanted = control.plan([("a", Kind.TEXT)])["a"]
        control.stepped(0.9 + 0.1 * wanted, 1, [Outcome("a", wanted, wanted, min(wanted, reach))])
        return wanted

    for i in range(200):
        assert step((0, 2, 3, 1)[i % 4]) <= 6
    assert max(step(16) for _ in range(6)) == 16


@given(st.integers(2, 12), st.integers(1, 8))
@settings(deadline=None, max_examples=20)
def test_where_a_part_of_a_draft_is_worth_nothing_all_of_it_is_asked_for(
    most: int, count: int
) -> None:
    machine = gpu()
    machine.control = Control(most, unit=most)
    gain, plans = machine.run(200, ids(count), lambda id: 0.7)
    assert {length for plan in plans for length in plan.values()} == {most} and gain > 1


def test_with_images_in_the_context_is_judged_apart() -> None:
    control = Control(16)
    for step in range(200):
        sequence = str(step // 20)
        plan = control.plan([(sequence, Kind.IMAGE)])
        found = [Outcome(id, wanted, wanted, 0) for id, wanted in plan.items()]
        control.stepped(1.0, 1, found)
    with_image = control.plan([("with", Kind.IMAGE)]).get("with", 0)
    assert control.plan([("without", Kind.TEXT)])["without"] > with_image


@pytest.mark.parametrize("count", [1, 4])
def test_what_is_earned_on_text_is_not_lost_on_images(count: int) -> None:
    """Short answers about many pictures, behind text that went well."""
    machine = gpu()
    assert machine.run(500, ids(count), lambda id: 0.9)[0] > 1.3
    seconds = tokens = 0.0
    for answer in range(30):
        names = [f"{answer} {id}" for id in ids(count)]
        gain, _ = machine.run(30, names, lambda id: 0.15, Kind.IMAGE)
        seconds, tokens = seconds + 30 / gain, tokens + 30
    assert tokens / seconds > 0.97


def test_what_is_known_by_heart_is_drafted_though_its_text_did_not_pay() -> None:
    machine = gpu()
    machine.run(300, ids(1), lambda id: 0.1)
    gain, plans = machine.run(60, ids(1), lambda id: 0.95, Kind.RECALLED)
    assert drafted(plans) > 0.9 and gain > 2


def test_seconds_saved_are_those_that_the_same_tokens_would_have_taken_less_the_steps_own() -> None:
    control = Control(4)
    for _ in range(ENOUGH):
        assert control.stepped(2.0, 2) == 0.0
    plan = control.plan([("a", Kind.TEXT), ("b", Kind.TEXT)])
    assert plan
    assert control.stepped(3.0, 2, [Outcome("a", 2, 2, 2), Outcome("b", 2, 0, 0)]) == 1.0
    assert control.stepped(3.0, 2, [Outcome("a", 2, 2, 0)]) == -1.0


def test_steps_that_did_other_things_too_tell_of_acceptance_but_not_of_costs() -> None:
    control = Control(8)
    for _ in range(ENOUGH):
        control.stepped(None, 1)
    assert control.plan([("a", Kind.TEXT)]) == {}
    for _ in range(ENOUGH):
        control.stepped(1.0, 1)
    assert control.plan([("a", Kind.TEXT)])
    for _ in range(100):
        assert control.stepped(None, 1, [Outcome("a", 8, 8, 0)]) == 0.0
    assert control.plan([("a", Kind.TEXT)]) == {}


def test_a_plain_step_may_stand_for_others_that_were_like_it() -> None:
    """A crowd is tried as soon, in steps, as if each of them had been told of."""
    contexts = [(str(n), Kind.TEXT) for n in range(16)]

    def steps_until_it_is_tried(alike: int) -> int:
        control, steps = Control(8), 0
        while not control.plan(contexts):
            control.stepped(1.0, 16, alike=alike)
            steps += alike
        return steps

    assert abs(steps_until_it_is_tried(1) - steps_until_it_is_tried(16)) <= 16


def test_where_drafts_do_not_pay_nobody_need_ask_at_every_step() -> None:
    """Of a small model's step, asking is a good part."""
    machine = gpu()
    machine.run(200, ids(1), lambda id: 0.05)
    asked = 0
    while not machine.control.plan([("0", Kind.TEXT)], 1 + machine.control.rests):
        machine.control.stepped(2.5, 1, alike=1 + machine.control.rests)
        asked += 1
        assert machine.control.rests == RESTS
    assert 0 < asked < LONGEST_WAIT and machine.control.rests == 0
    _, plans = machine.run(3 * LONGEST_WAIT, ids(1), lambda id: 1.0)
    assert plans[-1] and machine.control.rests == 0


def test_a_sequence_may_end_while_its_draft_is_checked() -> None:
    control = Control(4)
    for _ in range(ENOUGH):
        control.stepped(1.0, 1)
    assert control.plan([("a", Kind.TEXT)])
    control.forget("a")
    control.forget("never seen")
    control.stepped(1.0, 1, [Outcome("a", 4, 4, 4)])
    assert control.plan([]) == {}


@pytest.mark.parametrize("gain", [GAIN - 0.02, GAIN + 0.02])
def test_drafts_need_a_gain_of_a_twentieth(gain: float) -> None:
    """One token that is always right, of a step that takes 2 / gain as long as a plain one."""
    machine = Machine(Control(1), lambda n: 1.0, lambda n: 2 / gain)
    share = drafted(machine.run(500, ids(1), lambda id: 1.0)[1])
    assert share > 0.9 if gain > GAIN else share < 0.5

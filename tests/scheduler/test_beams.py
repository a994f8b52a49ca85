"""Beams in the scheduler: whoever goes on reads its own tokens, and everything is given back.

The world's memory holds names of what was computed, so a page that two beams write, or one that was
not copied in time, is found at once. Which beams go on is drawn at random.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.cache.layer_group import LayerGroup
from mmserve.config import SchedulerConfig
from mmserve.errors import RequestError
from mmserve.request import BeamParams, Request, SamplingParams, Segment
from mmserve.scheduler.admission import beam_limit
from mmserve.sequence import Sequence, SequenceStatus
from tests.scheduler.memory import PAGE
from tests.scheduler.test_groups import IMAGES, prompts, worlds
from tests.scheduler.world import FULL, World, prompt, window


@dataclass
class BeamWorld(World):
    """`seed`: of who goes on. `width` of each root: how many beams."""

    seed: int = 0
    known: set[Sequence] = field(default_factory=set)  # of which is known what may come next

    def __post_init__(self) -> None:
        super().__post_init__()
        self.random = random.Random(self.seed)
        self.roots: dict[str, Sequence] = {}
        self.said: dict[str, int] = {}

    def beams(self, segments: tuple[Segment, ...], width: int, max_tokens: int) -> Sequence:
        """Raises what admission raises."""
        self._arrival += 1
        params = SamplingParams(max_tokens=max_tokens, beams=BeamParams(width))
        request = Request(str(self._arrival), segments, params, arrival=self._arrival)
        seq = self.sequence(request)
        self.scheduler.check_admissible(request, seq.num_prompt_tokens, seq.num_image_tokens)
        self.live.append(seq)
        self.roots[request.id], self.said[request.id] = seq, 0
        self.scheduler.add(seq)
        return seq

    def room(self, segments: tuple[Segment, ...], width: int) -> int:
        """Text tokens that each beam may come to."""
        params = SamplingParams(beams=BeamParams(width))
        seq = self.sequence(Request("", segments, params))
        return beam_limit(self.scheduler.holdings, seq.request, seq.num_prompt_tokens)

    def members(self, root: Sequence) -> list[Sequence]:
        return self.scheduler.beams.members(root)

    def _launch(self, seq: Sequence, token: int) -> None:
        if seq.id not in self.roots:
            return super()._launch(seq, token)
        self.known.add(seq)
        return None

    def _land(self, flight: list[tuple[Sequence, int]]) -> None:
        super()._land(flight)
        for root in list(self.roots.values()):
            members = self.members(root)
            computed = [seq.num_computed_tokens == seq.num_tokens for seq in members]
            if root not in self.live or not all(computed) or not self.known.issuperset(members):
                continue
            self.known.difference_update(members)
            beams, limit = root.request.params.beams, root.request.params.max_tokens
            assert beams is not None and limit is not None
            self.said[root.id] += 1
            if self.said[root.id] == limit:
                self.scheduler.finish(root)
                self.live.remove(root)
                continue
            width = self.random.randint(1, beams.width)
            picks = [(self.random.choice(members), self.random.randrange(9)) for _ in range(width)]
            self.scheduler.beams.branch(root, picks)
            self.check()

    def check(self) -> None:
        super().check()
        for root in self.roots.values():
            members = self.members(root)
            runs = [seq in self.scheduler.running for seq in members]
            assert all(runs) or not any(runs), "a part of the beams was preempted"
            assert len({seq.num_tokens for seq in members}) == 1
            assert root.finished == (root not in self.live)


def beam_world(world: World, seed: int) -> BeamWorld:
    names = ("text_pages", "vision_pages", "config", "prefix_caching", "failing", "overlaps")
    more = ("groups", "in_context", "whole_prompts", "head")
    return BeamWorld(**{name: getattr(world, name) for name in (*names, *more)}, seed=seed)


TURNS = st.tuples(
    prompts(),
    st.integers(1, 14),
    st.sampled_from([0, 1, 2, 3, 4]),  # beams; 0: none
    st.integers(0, 6),  # steps before the next
    st.sampled_from([None, None, None, 0, 1, 3]),  # who is aborted then
)


@given(worlds(), st.lists(TURNS, min_size=1, max_size=7), st.integers(0, 1000))
@settings(max_examples=150)
def test_whatever_the_layers_and_the_company_beams_read_what_is_theirs(
    world: World,
    turns: list[tuple[tuple[Segment, ...], int, int, int, int | None]],
    seed: int,
) -> None:
    beams = beam_world(world, seed)
    for segments, count, width, steps, victim in turns:
        text = sum(len(getattr(s, "token_ids", ())) for s in segments)
        try:
            if width:
                room = beams.room(segments, width) - text
                beams.beams(segments, width, max(min(count, room), 1))
            else:
                room = beams.scheduler.text_capacity - text
                beams.submit(segments, max(min(count, room), 1))
        except RequestError:
            continue
        for _ in range(steps):
            beams.step()
        if victim is not None and beams.live:
            beams.abort(beams.live[victim % len(beams.live)])
    beams.run()
    beams.assert_right()
    beams.assert_idle()


def split(world: BeamWorld, length: int, width: int, max_tokens: int = 20) -> Sequence:
    """A request whose prompt of so many tokens is computed, and which has its beams."""
    root = world.beams(prompt(length, IMAGES[0]), width, max_tokens)
    world.random = Steady(width)
    while root in world.members(root):
        world.step()
    return root


class Steady(random.Random):
    """As many beams as can be; all go on from the first."""

    def __init__(self, width: int) -> None:
        super().__init__(0)
        self.width = width

    def randint(self, a: int, b: int) -> int:
        return self.width

    def choice(self, seq: Any) -> Any:
        return seq[0]


class Parted(Steady):
    """Each beam goes on by itself."""

    last = 0

    def choice(self, seq: Any) -> Any:
        self.last += 1
        return seq[self.last % len(seq)]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("group", [FULL, window(6)])
def test_a_beam_copies_its_last_page_when_it_writes_there_and_no_other(
    group: LayerGroup, length: int
) -> None:
    world = BeamWorld(groups=(group,), prefix_caching=False)
    split(world, length, 3)
    copies = [copy for chunk in world.step().chunks for copy in chunk.copies]
    # The last to write has the page for itself.
    assert len(copies) == (0 if length % PAGE == 0 else 2)
    assert len({copy.source for copy in copies}) == min(len(copies), 1)
    world.run()
    world.assert_idle()


def test_beams_hold_what_they_share_once() -> None:
    world = BeamWorld(prefix_caching=False, text_pages=40)
    root = split(world, 4 * PAGE + 1, 4)
    world.random = Parted(4)
    world.step()
    held = world.text[0].num_pages - world.text[0].num_free
    assert held == 4 + 4, "four whole pages of the prompt, and a last one of each beam"
    assert world.scheduler.beams.shared(root, [10]) == (10 * (8 + 2), 10 * 4 * (5 + 2))
    assert world.vision[0].num_referenced == 2


def test_beams_are_preempted_together_and_computed_again_behind_what_they_share() -> None:
    world = BeamWorld(prefix_caching=False, text_pages=9)
    first = world.submit(prompt(9, base=100), 19)
    root = split(world, 9, 3)
    while root.status is not SequenceStatus.PREEMPTED:
        world.step()
    assert world.scheduler.waiting == [root] and world.members(root) == [root]
    assert world.scheduler.beams.tail(root) == 1, "all but the last token is common to all"
    made = root.num_tokens
    assert made > 9
    while first in world.live:
        world.step()
    while root in world.members(root):
        world.step()
    assert [seq.num_tokens for seq in world.members(root)] == [made + 1] * 3
    world.run()
    world.assert_right()
    world.assert_idle()


def test_places_are_kept_for_all_beams_of_whoever_is_admitted() -> None:
    world = BeamWorld(config=SchedulerConfig(max_num_seqs=5))
    root, later = world.beams(prompt(3), 4, 3), [world.submit(prompt(3), 3) for _ in range(2)]
    world.step()
    assert world.scheduler.waiting == later[1:]
    with pytest.raises(RequestError, match="6 beams are asked for; 5 sequences run at once here"):
        world.beams(prompt(3), 6, 3)
    world.run()
    assert root.finished
    world.assert_idle()


def test_searches_that_press_on_each_other_all_come_to_their_end() -> None:
    preemptions = 0
    for seed in range(60):
        numbers = random.Random(seed)
        groups = numbers.choice([(FULL,), (FULL, window(5)), (window(9),)])
        world = BeamWorld(
            text_pages=numbers.randint(6, 14),
            prefix_caching=numbers.random() < 0.5,
            overlaps=numbers.random() < 0.5,
            config=SchedulerConfig(max_num_batched_tokens=numbers.choice([2, 7, 64])),
            groups=groups,
            seed=seed,
        )
        for _ in range(3):
            segments = prompt(numbers.randint(1, 9), IMAGES[0], numbers.randint(1, 5))
            length = sum(len(getattr(s, "token_ids", ())) for s in segments)
            width = numbers.randint(2, 4)
            room = min(world.room(segments, width) - length, 30)
            if room > 0:
                world.beams(segments, width, room)
            world.submit(segments, min(world.scheduler.text_capacity - length, 20))
        world.run()
        world.assert_right()
        world.assert_idle()
        preemptions += world.preemptions
    assert preemptions > 100

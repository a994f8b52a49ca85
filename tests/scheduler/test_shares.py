"""Tenants that share steps, however much they ask and whenever they leave, against a few lines.

What is looked at is only what each got, in computed tokens by its weight, and who was held back:
who has a prompt, or a part of one, that a step has left behind. There are pages for all.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from mmserve.config import SchedulerConfig
from mmserve.request import Tenant
from mmserve.sequence import Sequence
from tests.scheduler.world import World, prompt

TENANTS = [Tenant("a"), Tenant("b", weight=3.0), Tenant("c")]
PROMPT, ANSWER = 40, 4  # tokens at most
PLENTY = 64  # seats: nobody waits for one
TALKING = 12  # requests at once, at most, that have more than a token to decode
# For so many steps nothing more, always something and never much, more than a share; or the second
# and then the third.
WANTS = st.sampled_from(["nothing", "little", "all", "more"])


def name(seq: Sequence) -> str:
    return seq.request.tenant.name


class Shares(RuleBasedStateMachine):
    """`ahead`, by who is held back and another: the most that this one got more in any run of steps
    until now in all of which that one was held back."""

    @initialize(seats=st.sampled_from([2, 4, PLENTY, PLENTY]), budget=st.sampled_from([4, 8, 32]))
    def begin(self, seats: int, budget: int) -> None:
        self.config = SchedulerConfig(max_num_seqs=seats, max_num_batched_tokens=budget)
        self.world = World(text_pages=3000, config=self.config, prefix_caching=False)
        self.ahead: defaultdict[tuple[str, str], float] = defaultdict(float)

    def ask(self, tenant: Tenant, tokens: int, answer: int) -> None:
        talking = sum(seq.request.params.max_tokens != 1 for seq in self.world.live)
        answer = answer if talking < TALKING else 1
        self.world.submit(prompt(tokens), answer, tenant=tenant)

    @rule(
        tenant=st.sampled_from(TENANTS),
        tokens=st.integers(1, PROMPT),
        answer=st.integers(1, ANSWER),
    )
    def ask_once(self, tenant: Tenant, tokens: int, answer: int) -> None:
        self.ask(tenant, tokens, answer)

    @rule(wants=st.tuples(WANTS, WANTS, WANTS), count=st.integers(10, 40))
    def go_on(self, wants: tuple[str, str, str], count: int) -> None:
        for n in range(count):
            live = Counter(map(name, self.world.live))
            for tenant, want in zip(TENANTS, wants, strict=True):
                later = want == "more" and n >= count // 2
                if want == "little" or (want == "more" and not later):
                    if n % 2:  # which has not ended when the next one comes
                        self.ask(tenant, 1, ANSWER)
                while (want == "all" or later) and live[tenant.name] < 4:
                    self.ask(tenant, PROMPT, 1)
                    live[tenant.name] += 1
            self.step()

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = self.world.live
        self.world.abort(live[data.draw(st.integers(0, len(live) - 1))])

    @rule()
    def step(self) -> None:
        left = {seq: seq.num_tokens - seq.num_computed_tokens for seq in self.world.live}
        batch = self.world.step()
        for chunk in batch.chunks:
            left[chunk.seq] -= chunk.count
        got: defaultdict[str, float] = defaultdict(float)
        for chunk in batch.chunks:
            got[name(chunk.seq)] += chunk.count / chunk.seq.request.tenant.weight
        waiting = self.world.scheduler.waiting
        held = {name(seq) for seq, tokens in left.items() if tokens > 1 or seq in waiting}
        self.check(got, held)

    def check(self, got: defaultdict[str, float], held: set[str]) -> None:
        """Who is held back never falls behind anybody by more than a step on either side, and what
        is done in the seats that were taken before."""
        for one in TENANTS:
            for other in TENANTS:
                pair = one.name, other.name
                more = self.ahead[pair] + got[other.name] - got[one.name]
                self.ahead[pair] = max(more, 0) if one.name in held else 0
        seats = self.config.max_num_seqs
        taken = TALKING * ANSWER if seats == PLENTY else seats * (PROMPT + ANSWER)
        most = 2 * self.config.max_num_batched_tokens + taken
        assert max(self.ahead.values()) <= most, f"{self.ahead} in {seats} seats"

    def teardown(self) -> None:
        """What was not aborted is answered as ever, and nothing is held."""
        if hasattr(self, "world"):
            self.world.run()
            self.world.assert_right()
            self.world.assert_idle()


TestShares = Shares.TestCase
TestShares.settings = settings(max_examples=40, stateful_step_count=6, deadline=None)

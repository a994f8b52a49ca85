"""What of a draft is right: the walk down the tree along what the target chooses.

Owns the rule of acceptance. Knows nothing of logits: the target has chosen a token behind each of
the draft's as it would have without it, from the same distribution and with the same random number
for the same place in the answer.

That is all of speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318)
where a draft is a function of what is known: of a proposal with all its mass in one token x, the
rule "accept with probability min(1, p(x)/q(x)), else draw from what is left of p" accepts x with
probability p(x) and draws other tokens in proportion to p, which is to draw from p and to see
whether it is x. The same holds for the children of one token together. So greedy or random, an
answer is distributed as without drafts, and one with a seed is the same, token for token.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmserve.spec.draft import Draft


def accepted(draft: Draft, chosen: Sequence[int]) -> tuple[int, ...]:
    """The numbers of the draft's tokens that are right, in order.

    `chosen`: the token behind the last known one, and behind each of the draft's.
    """
    assert len(chosen) == 1 + len(draft)
    path: list[int] = []
    at = -1
    while (step := draft.children(at).get(chosen[1 + at])) is not None:
        path.append(step)
        at = step
    return tuple(path)

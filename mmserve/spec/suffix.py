"""Suffix decoding, keyed by image: what followed in earlier answers about the same pictures.

Owns the guess: earlier places where the longest end of the text stood before, in the sequence
itself and in answers that its tenant got about its images, vote for what comes next; answers about
anything else count where they match longer. This is SuffixDecoding (arXiv 2411.04975) with the
counts of its suffix trees taken from an index when they are needed. Knows nothing of models, nor of
another tenant's answers.

A place that matched m tokens speaks with the weight of its vote against a doubt of 4 / m: alone, it
is right with the probability m / (m + 4), which is about what prose and programs show. So a draft
grows with the match (the paper's alpha), and faster where places agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from mmserve.spec.answers import END, Answers, Subject
from mmserve.spec.branches import ROOT, Branches
from mmserve.spec.draft import Draft
from mmserve.spec.drafter import Context, Landed, Wanted
from mmserve.spec.index import Index
from mmserve.spec.own_texts import OwnTexts, end_of

TAIL = 64  # tokens of the question that are filed with its answer
LONGEST = 32  # tokens of a match: longer ones are no better
BY_HEART = 16  # tokens of one that is more than a turn of phrase, or the end of a question
LOOKS = 16  # places of one index that are compared
VOTERS = 8  # places that have a say, of those that matched longest
OWN_SIZES = (1, 3)
DOUBT = (
    4.0  # places that say something else, over the match's length: as prose and programs have it
)
LEAST = 0.1  # probability that a token and all before it are right


class _Voter(NamedTuple):
    """Says that the tokens at a place, and behind it, come next."""

    tokens: Sequence[int]
    at: int


class _Bud(NamedTuple):
    """A token that may be added to the tree; sorted, the likeliest is first."""

    unlikely: float  # minus the probability that it and all before it are right
    parent: int
    token: int
    depth: int
    voters: list[_Voter]  # who say so


class SuffixDrafter:
    """`num_bytes` of earlier answers are remembered; `width`: different tokens behind one; `sure`:
    how likely a draft's first token has to be, for where others could guess instead."""

    name = "suffix"
    taps: tuple[int, ...] = ()

    def __init__(
        self, num_bytes: int, width: int = 1, least: float = LEAST, sure: float = 0.0
    ) -> None:
        assert width > 0 and 0 < least <= 1, "a draft has tokens that may be right"
        self._width = width
        self._least = least
        self._sure = sure
        self._answers = Answers(num_bytes)
        self._own = OwnTexts(OWN_SIZES)

    def propose(self, wanted: Sequence[Wanted]) -> list[Draft | None]:
        return [self._guess(context, length) for context, length in wanted]

    def landed(self, context: Context, landed: Landed) -> None:
        self._own.landed(context, landed)

    def end(self, context: Context) -> None:
        """Its answer is remembered, with the end of the question that it answers."""
        self._own.end(context)
        prompt = context.num_prompt_tokens
        if len(context.token_ids) > prompt:
            answer = context.token_ids[max(prompt - TAIL, 0) :]
            for subject in (*_images(context), _anything(context)):
                self._answers.file(subject, answer)

    def recalls(self, context: Context) -> bool:
        """In its own text, or in answers about the same images; where there are none, in any."""
        subjects = _images(context) or [_anything(context)]
        about = [index for subject in subjects if (index := self._answers.about(subject))]
        tail = end_of(context, BY_HEART)
        return any(index.stood(tail, LOOKS) for index in (*about, self._own.index(context)))

    def _guess(self, context: Context, length: int) -> Draft | None:
        about = [index for s in _images(context) if (index := self._answers.about(s))]
        voters, longest = _voters([self._own.index(context), *about], context.token_ids)
        if longest < LONGEST and (others := self._answers.about(_anything(context))):
            of_others, longer = _voters([others], context.token_ids)
            if longer > longest:
                voters, longest = of_others, longer
        return self._grown(voters, longest, length)

    def _grown(self, voters: list[_Voter], matched: int, length: int) -> Draft | None:
        """The likeliest token first, wherever in the tree it hangs; `length` tokens in all."""
        branches = Branches(length)
        last = _Bud(-1.0, ROOT, 0, 0, voters)
        buds = self._behind(last, ROOT, matched) if matched else []
        if buds and -buds[0].unlikely < self._sure:
            return None
        while buds and len(branches) < length:
            bud = heappop(buds)
            number = branches.add(bud.parent, bud.token)
            assert number is not None, "there is room"
            for following in self._behind(bud, number, matched):
                heappush(buds, following)
        return branches.draft()

    def _behind(self, bud: _Bud, number: int, matched: int) -> list[_Bud]:
        """What its voters say comes behind it, the likeliest first."""
        depth, by_token = bud.depth, dict[int, list[_Voter]]()
        heard = DOUBT / (matched + depth)
        for voter in bud.voters:
            at = voter.at + depth
            if at < len(voter.tokens):
                heard += 1
                by_token.setdefault(voter.tokens[at], []).append(voter)
        by_token.pop(END, None)  # which was heard, but is no token
        most = sorted(by_token.items(), key=lambda item: -len(item[1]))[: self._width]
        found = [
            _Bud(bud.unlikely * len(voters) / heard, number, token, depth + 1, voters)
            for token, voters in most
        ]
        return [each for each in found if -each.unlikely >= self._least]


def _voters(indices: Sequence[Index], text: Sequence[int]) -> tuple[list[_Voter], int]:
    """The newest places where the longest end of `text` stood, and how long it is, in tokens."""
    longest = 0
    voters: list[_Voter] = []
    for index in indices:
        for at, matched in index.search(text, LONGEST, LOOKS):
            if matched > longest:
                longest, voters = matched, []
            if matched == longest and len(voters) < VOTERS:
                voters.append(_Voter(index.tokens, at))
            if longest == LONGEST and len(voters) == VOTERS:
                break  # no place can say more
    return voters, longest


def _images(context: Context) -> list[Subject]:
    return [Subject(context.tenant, image) for image in dict.fromkeys(context.images)]


def _anything(context: Context) -> Subject:
    return Subject(context.tenant, b"")

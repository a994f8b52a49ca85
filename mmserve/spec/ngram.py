"""Prompt lookup: what followed the last few tokens when they stood in this text before.

Owns an index of each sequence's own tokens. Knows nothing of models, other sequences or images.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmserve.spec.draft import Draft
from mmserve.spec.drafter import Context, Landed, Wanted
from mmserve.spec.index import Place
from mmserve.spec.own_texts import OwnTexts, end_of

LOOKS = 32  # earlier places that are compared


class NgramDrafter:
    """The longest match wins, `prompt_lookup_min` to `prompt_lookup_max` tokens; the newest of
    those that are equally long."""

    name = "ngram"
    taps: tuple[int, ...] = ()

    def __init__(self, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        assert 0 < prompt_lookup_min <= prompt_lookup_max, "matches have a length"
        self._longest = prompt_lookup_max
        self._texts = OwnTexts(sorted({prompt_lookup_min, prompt_lookup_max}))

    def propose(self, wanted: Sequence[Wanted]) -> list[Draft | None]:
        return [self._guess(context, length) for context, length in wanted]

    def landed(self, context: Context, landed: Landed) -> None:
        self._texts.landed(context, landed)

    def end(self, context: Context) -> None:
        self._texts.end(context)

    def recalls(self, context: Context) -> bool:
        return self._texts.index(context).stood(end_of(context, self._longest), LOOKS)

    def _guess(self, context: Context, length: int) -> Draft | None:
        index = self._texts.index(context)
        best: Place | None = None
        for place in index.search(context.token_ids, self._longest, LOOKS):
            if best is None or place.matched > best.matched:
                best = place
            if best.matched == self._longest:
                break
        return Draft.chain(_continued(context.token_ids, best.at, length)) if best else None


def _continued(tokens: Sequence[int], at: int, length: int) -> list[int]:
    """What stands there; where the text ends, it goes on repeating itself."""
    draft = list(tokens[at : at + length])
    period = len(tokens) - at
    while len(draft) < length:
        draft.append(draft[len(draft) - period])
    return draft

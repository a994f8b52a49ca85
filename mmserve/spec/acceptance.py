"""How often a draft's token at some depth is right, where the one before it was.

Owns these rates, of recent drafts. No torch; knows nothing of tokens, drafters or costs. A token
that was asked for and not guessed counts as wrong: it brought nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

HOPE = 0.7  # the rate before anything is known: trying shows soon
TRUST = 6.0  # tokens' worth of what one knows beforehand
LEAST = 0.02  # a token as unlikely as this is not worth a thought


class Acceptance:
    """Rates by depth, 1 for the token that follows the last known one.

    `memory`: tokens at a depth that are remembered, about; `prior`: what holds where nothing has
    been seen (None: the rate at the depth before).
    """

    def __init__(self, most: int, memory: int, prior: Acceptance | None = None) -> None:
        self._keep = 1 - 1 / memory
        self.prior = prior
        self._seen = [0.0] * most
        self._right = [0.0] * most
        self._rates: list[float] | None = None
        self._survival: list[float] | None = None

    def add(self, wanted: int, accepted: int) -> None:
        """Of `wanted` tokens in a row that were asked for, the first `accepted` were right."""
        for i in range(min(accepted + 1, wanted, len(self._seen))):
            self._seen[i] = self._seen[i] * self._keep + 1
            self._right[i] = self._right[i] * self._keep + (i < accepted)
        self._rates = self._survival = None

    def fade(self) -> None:
        """Half of what was seen is forgotten: it was a while ago."""
        self._seen = [seen / 2 for seen in self._seen]
        self._right = [right / 2 for right in self._right]
        self._rates = self._survival = None

    @property
    def rates(self) -> list[float]:
        if self._rates is None:
            self._rates = list(self._each())
        return self._rates

    @property
    def survival(self) -> list[float]:
        """By depth, how likely a token and all before it are right; as far as it is worth it."""
        if self._survival is None:
            survival, product = [], 1.0
            for rate in self._each():
                product *= rate
                if product < LEAST:
                    break
                survival.append(product)
            self._survival = survival
        return self._survival

    def _each(self) -> Iterator[float]:
        """The rates, worked out one by one."""
        if self.prior:
            for seen, right, base in zip(self._seen, self._right, self.prior.rates, strict=True):
                yield (right + TRUST * base) / (seen + TRUST)
            return
        rate = HOPE
        for seen, right in zip(self._seen, self._right, strict=True):
            rate = (right + TRUST * rate) / (seen + TRUST)
            yield rate

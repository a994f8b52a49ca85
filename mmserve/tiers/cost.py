"""Whether loading keys and values beats computing them: a few speeds, measured, and one comparison.

Owns the estimates. No torch, no clock; knows nothing of who loads or computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

WEIGHT = 0.2  # of a new measurement


@dataclass
class Costs:
    """What is not known yet is None, or not there: loading is then taken to be worth it.

    `byte_s`: by tier, seconds a byte takes to the pools; `token_s`: of a text token of a prompt;
    `image_token_s`: of a visual token, its share of the encoder's time included.
    """

    byte_s: dict[str, float] = field(default_factory=dict)
    token_s: float | None = None
    image_token_s: float | None = None

    def loaded(self, tier: str, num_bytes: int, seconds: float) -> None:
        """So many bytes came from a tier in so many seconds."""
        if num_bytes:
            self.byte_s[tier] = _blend(self.byte_s.get(tier), seconds / num_bytes)

    def computed(self, text_tokens: int, image_tokens: int, seconds: float) -> None:
        """A step with so many tokens of prompts, and images, took so many seconds."""
        if text_tokens and not image_tokens:
            self.token_s = _blend(self.token_s, seconds / text_tokens)
        elif image_tokens:
            alone = max(seconds - text_tokens * (self.token_s or 0.0), 0.0)
            self.image_token_s = _blend(self.image_token_s, alone / image_tokens)

    def load_s(self, sizes: Mapping[str, int]) -> float:
        """Seconds for bytes by tier, one after another."""
        return sum(size * self.byte_s.get(tier, 0.0) for tier, size in sizes.items())

    def compute_s(self, text_tokens: int, image_tokens: int) -> float | None:
        """Seconds; None where it has never been seen."""
        speeds = ((text_tokens, self.token_s), (image_tokens, self.image_token_s))
        if any(count and speed is None for count, speed in speeds):
            return None
        return sum(count * (speed or 0.0) for count, speed in speeds)

    def worth(self, sizes: Mapping[str, int], text_tokens: int, image_tokens: int) -> bool:
        """Whether to load so many bytes by tier instead of computing so many tokens."""
        compute = self.compute_s(text_tokens, image_tokens)
        return compute is None or self.load_s(sizes) < compute


def _blend(old: float | None, new: float) -> float:
    return new if old is None else (1 - WEIGHT) * old + WEIGHT * new

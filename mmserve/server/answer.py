"""An answer in the making: what the token events of one generation add up to.

Owns collected text, token ids, log-probabilities, and the JSON of usage and timings that both text
surfaces share. Knows nothing of transports.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mmserve.request import FinishReason, Timings, TokenEvent, TokenLogprob, Usage


@dataclass
class Answer:
    """Grows by `add`; complete once `finish_reason` is set."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    error: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def add(self, event: TokenEvent) -> None:
        if event.text:
            self.pieces.append(event.text)
        self.token_ids.extend(event.token_ids)
        self.logprobs.extend(event.logprobs)
        self.finish_reason = event.finish_reason or self.finish_reason
        self.stop_string = event.stop_string or self.stop_string
        self.usage = event.usage or self.usage
        self.timings = event.timings or self.timings
        self.error = event.error or self.error

    def spliceable_tokens(self) -> tuple[int, ...] | None:
        """The exact tokens of the text, or None where a stop string cut the text short of them."""
        return None if self.stop_string is not None else tuple(self.token_ids)


def input_details(usage: Usage) -> dict[str, int]:
    """The breakdown of a prompt; `cached` tokens were read, `cache_write` ones computed."""
    return {
        "cached_tokens": usage.cached_tokens,
        "cache_write_tokens": usage.prompt_tokens - usage.cached_tokens,
        "image_tokens": usage.image_tokens,
        "text_tokens": usage.prompt_tokens - usage.image_tokens,
        "cached_image_tokens": usage.cached_image_tokens,
    }


def cache_json(usage: Usage) -> dict[str, int]:
    """Extension `usage.cache`: images found and computed, text tokens found in the prefix cache."""
    return {
        "vision_hits": usage.vision_hits,
        "vision_misses": usage.vision_misses,
        "prefix_tokens": usage.cached_tokens - usage.cached_image_tokens,
    }


def timings_json(timings: Timings, usage: Usage) -> dict[str, float]:
    """Extension `timings`: milliseconds, and how many tokens they were spent on."""
    return {
        "queue_ms": round(timings.queue_ms, 3),
        "image_ms": round(timings.image_ms, 3),
        "prompt_ms": round(timings.prompt_ms, 3),
        "predicted_ms": round(timings.predicted_ms, 3),
        "prompt_n": usage.prompt_tokens - usage.cached_tokens,
        "cache_n": usage.cached_tokens,
        "predicted_n": usage.completion_tokens,
    }


def _logprob(token_id: int, text: str, logprob: float) -> dict[str, Any]:
    return {
        "token": text,
        "logprob": logprob,
        "bytes": list(text.encode("utf-8", "replace")),
        "token_id": token_id,
    }


def logprob_json(logprob: TokenLogprob) -> dict[str, Any]:
    """One token's entry, the same on both surfaces."""
    return {
        **_logprob(logprob.token_id, logprob.text, logprob.logprob),
        "top_logprobs": [_logprob(*top) for top in logprob.top],
    }

"""An answer in the making: what the token events of one generation add up to.

Owns collected text, calls, token ids, log-probabilities, and the JSON of usage and timings that
both text surfaces share. Knows nothing of transports.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mmserve.request import FinishReason, Timings, TokenEvent, TokenLogprob, Usage
from mmserve.server.wire import new_id
from mmserve.tools import CallParser, Piece


@dataclass
class Call:
    """A function call as it grows; `ended` once its arguments are whole."""

    name: str
    id: str = field(default_factory=lambda: new_id("call"))
    arguments: str = ""
    ended: bool = False


class Shown(NamedTuple):
    """What an event adds to what the client sees; log-probabilities are of text alone."""

    pieces: list[Piece]
    logprobs: tuple[TokenLogprob, ...]


@dataclass
class Answer:
    """Grows by `add`; complete once `finish_reason` is set. `parser` finds calls in it."""

    parser: CallParser | None = None
    pieces: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    error: str | None = None
    code: str | None = None
    _held: list[TokenLogprob] = field(default_factory=list)  # of text that may become a call

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def add(self, event: TokenEvent) -> Shown:
        shown = self._show(event)
        self.logprobs.extend(shown.logprobs)
        self.token_ids.extend(event.token_ids)
        self.finish_reason = event.finish_reason or self.finish_reason
        self.stop_string = event.stop_string or self.stop_string
        self.usage = event.usage or self.usage
        self.timings = event.timings or self.timings
        self.error, self.code = event.error or self.error, event.code or self.code
        return shown

    def _show(self, event: TokenEvent) -> Shown:
        if self.parser is None:
            if event.text:
                self.pieces.append(event.text)
            return Shown([Piece("text", event.text)] if event.text else [], event.logprobs)
        found = self.parser.push(event.text)
        if event.finish_reason is not None:
            found += self.parser.flush()
        for piece in found:
            self._take(piece)
        self._held.extend(event.logprobs)
        if self.calls:
            self._held.clear()
        if not any(piece.kind == "text" for piece in found):
            return Shown(found, ())
        logprobs, self._held = tuple(self._held), []
        return Shown(found, logprobs)

    def _take(self, piece: Piece) -> None:
        if piece.kind == "text":
            self.pieces.append(piece.text)
        elif piece.kind == "call":
            self.calls.append(Call(piece.text))
        elif piece.kind == "arguments":
            self.calls[-1].arguments += piece.text
        else:
            self.calls[-1].ended = True

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


def cache_json(usage: Usage) -> dict[str, int | float | str]:
    """Extension `usage.cache`: images found and computed, text tokens found in the prefix cache,
    the vision mode where it makes the answer approximate, so the format of images' KV, and of a
    beam search, which part of its beams' KV bytes what they share has saved."""
    more = {
        "vision_mode": usage.vision_mode,
        "vision_kv_dtype": usage.vision_kv_dtype,
        "beam_kv_saved": usage.beam_kv_saved,
    }
    return {
        "vision_hits": usage.vision_hits,
        "vision_misses": usage.vision_misses,
        "prefix_tokens": usage.cached_tokens - usage.cached_image_tokens,
        **{name: value for name, value in more.items() if value is not None},
    }


def timings_json(timings: Timings, usage: Usage) -> dict[str, float]:
    """Extension `timings`: milliseconds, and how many tokens they were spent on."""
    drafts = {"draft_n": timings.drafted, "draft_n_accepted": timings.accepted}
    return {
        "queue_ms": round(timings.queue_ms, 3),
        "image_ms": round(timings.image_ms, 3),
        "prompt_ms": round(timings.prompt_ms, 3),
        "predicted_ms": round(timings.predicted_ms, 3),
        "prompt_n": usage.prompt_tokens - usage.cached_tokens,
        "cache_n": usage.cached_tokens,
        "predicted_n": usage.completion_tokens,
        **(drafts if timings.drafted else {}),
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

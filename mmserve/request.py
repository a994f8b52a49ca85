"""What a user asked, and what comes back: host state only.

Owns `SamplingParams`, segments, `Request` and the events that leave the engine. Knows nothing of
tensors, pages, JSON or sockets. A request is a list of segments: text tokens or one image.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Constraint:
    """The form that an answer must have.

    `kind`: "schema" (`text` is a JSON schema), "regex", "choice" (a JSON array of strings) or
    "grammar" (Lark or GBNF). `lenient`: parts of a schema that cannot be enforced are left out.
    `param` is the request's field, for error messages.
    """

    kind: str
    text: str
    lenient: bool = False
    param: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class BeamParams:
    """Several answers are followed at once, and the `count` best are returned.

    `width` of them, in `groups` of equal size that keep away from each other's tokens: what other
    groups have chosen in the same place costs `diversity_penalty` a time, in natural logarithms of
    probability. A whole answer counts as its log-probability / length ** `length_penalty`.
    `early_stopping`: True: the search ends with `width` whole answers; False: when the best of the
    others is not better as it is; "never": when it cannot become better.
    """

    width: int
    count: int = 1
    groups: int = 1
    diversity_penalty: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. `temperature` 0 is greedy. Validated by `validate`."""

    max_tokens: int | None = None  # None: until the context is full
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: off; n: the chosen token's and the n best
    constraint: Constraint | None = None
    beams: BeamParams | None = None  # None: one answer, token by token


@dataclass(frozen=True, eq=False)
class ImageInput:
    """One image as a request carries it.

    `digest` [32 bytes] is its identity (see vision.preprocess); `pixels` is what the decoder made
    of `data`, or None when the pool already held the digest and decoding was skipped.

    Of a transformers checkpoint: `token_ids` is the run that its processor makes of the image, the
    tokens between image tokens included; `inputs` are the processor's tensors; `positions` int
    [axes, num_tokens], from 0, where they are not simply 0, 1, 2 ...; `span` is how far the image
    moves the position of what follows (None: num_tokens).
    """

    digest: bytes
    data: bytes
    num_tokens: int
    pixels: Any = None
    token_ids: tuple[int, ...] | None = None
    inputs: Any = None
    positions: Any = None
    span: int | None = None
    part_of: ImageInput | None = None  # the image that this was cut from

    @property
    def whole(self) -> ImageInput:
        return self.part_of or self

    @property
    def width(self) -> int:
        """Positions that it takes."""
        return self.num_tokens if self.span is None else self.span

    def cut(self, count: int) -> tuple[ImageInput, ImageInput]:
        """Its first `count` tokens and the rest, both at the image's place: the head takes no
        positions, and the rest takes all of them."""
        ids, local = self.token_ids, self.positions
        parts = [
            replace(
                self,
                num_tokens=len(range(self.num_tokens)[part]),
                token_ids=None if ids is None else ids[part],
                positions=range(self.num_tokens)[part] if local is None else local[:, part],
                span=span,
                part_of=self,
            )
            for part, span in ((slice(count), 0), (slice(count, None), self.width))
        ]
        return parts[0], parts[1]


@dataclass(frozen=True)
class TextSegment:
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class ImageSegment:
    """`marked`: forgotten; what saw it stays as far as it is cached, and nothing new sees it."""

    image: ImageInput
    marked: bool = False


Segment = TextSegment | ImageSegment


@dataclass(frozen=True)
class Streaming:
    """How a request goes on when it outgrows `window` text tokens, prompt and output: the oldest
    behind the first `sinks` tokens are dropped, so that the `keep` newest stay.

    `images`: which images of dropped text stay readable: all (None), those among the sequence's
    last so many, or those with these digests. Where the text around an image stays, it stays, too.
    """

    window: int
    sinks: int
    keep: int
    images: frozenset[bytes] | int | None = None


class FinishReason(enum.Enum):
    STOP = "stop"  # end-of-turn token, stop token or stop string
    LENGTH = "length"  # max_tokens or the context limit
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class TokenLogprob:
    token_id: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()  # (token id, text, logprob), best first


@dataclass(frozen=True)
class Usage:
    """Token counts of one request; a cached token is one whose KV was read, not computed."""

    prompt_tokens: int = 0  # text and image
    image_tokens: int = 0
    cached_tokens: int = 0  # text and image
    cached_image_tokens: int = 0
    completion_tokens: int = 0
    vision_hits: int = 0  # images
    vision_misses: int = 0  # images
    dropped_tokens: int = 0  # text tokens, prompt and output, that a streaming request left behind
    dropped_images: int = 0  # places of images, likewise
    vision_mode: str | None = None  # named where it makes the answer approximate
    vision_kv_dtype: str | None = None  # of images that were not read as computed, the lowest
    beam_kv_saved: float | None = None  # of a beam search: see `Beams.shared`


@dataclass(frozen=True)
class Timings:
    """Milliseconds of one request, and what speculation did for it."""

    queue_ms: float = 0.0
    image_ms: float = 0.0
    prompt_ms: float = 0.0  # from first scheduled to first token, images included
    predicted_ms: float = 0.0
    drafted: int = 0  # tokens that a drafter guessed
    accepted: int = 0  # of these, the ones that were right


@dataclass(frozen=True)
class Choice:
    """One of several answers. `score`: a beam's log-probability by its length."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    score: float


@dataclass(frozen=True)
class TokenEvent:
    """What one step made for one request. The last event has a finish reason, usage, timings.

    `choices`: of a beam search, best first, in its last event, whose own text is the first's.
    `error` and its `code` say what ended it otherwise; no code: a fault of this request alone.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    error: str | None = None
    code: str | None = None
    choices: tuple[Choice, ...] = ()


@dataclass(frozen=True)
class Tenant:
    """For whom a request runs. Steps are shared between unlike `name`s, by `weight`; what is cached
    is found, and speeds anybody up, under an equal `salt` only."""

    name: str = ""
    salt: bytes = b""
    weight: float = 1.0


EVERYBODY = Tenant()


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it. `prefill_only` computes KV and makes no token;
    `durable`: its KV may outlive the process."""

    id: str
    segments: tuple[Segment, ...]
    params: SamplingParams
    prefill_only: bool = False
    arrival: float = field(default_factory=time.monotonic)
    streaming: Streaming | None = None  # None: it ends where the context does
    durable: bool = False
    tenant: Tenant = EVERYBODY

    @property
    def images(self) -> list[ImageInput]:
        """Those that are shown."""
        segments = (s for s in self.segments if isinstance(s, ImageSegment))
        return [s.image for s in segments if not s.marked]

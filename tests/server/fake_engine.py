"""A deterministic stand-in for the engine: echoes words and image digests, and stops where told.

Owns what protocol tests need to see: counts, aborts and the prompts it was given. A test that needs
something to be still running holds it (`hold_at`); nothing here depends on the clock. Text tokens
are UTF-8 bytes, an image is `IMAGE_TOKENS` tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mmserve.config import ImageLimits
from mmserve.errors import (
    ContextLengthExceededError,
    EngineUnavailableError,
    ImageTooLargeError,
    InvalidImageError,
    KVRefusedError,
    PinBudgetExceededError,
    QueueFullError,
    TooManyImagesError,
    UnsupportedImageTypeError,
)
from mmserve.held_image import HeldImage, ImageId
from mmserve.kv_snapshot import FREE, ImageOwner, PoolPages, PrefixOwner, Snapshot
from mmserve.prompt import ImagePart, Message, Prompt, TextPart, TokensPart
from mmserve.request import (
    EVERYBODY,
    Constraint,
    FinishReason,
    ImageInput,
    ImageSegment,
    SamplingParams,
    Segment,
    Streaming,
    Tenant,
    TextSegment,
    Timings,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from mmserve.tools import HERMES, ToolFormat

IMAGE_TOKENS = 16
PNG = b"\x89PNG\r\n\x1a\n"
LOOK_S = 0.002  # between two looks whether a held generation may go on


@dataclass(frozen=True)
class FakeInfo:
    name: str = "mm/fake"
    max_model_len: int = 4096
    image_tokens: int = IMAGE_TOKENS
    image_limits: ImageLimits = ImageLimits(max_bytes=1024 * 1024, max_images=8)
    created: int = 1_790_000_000
    default_sampling: SamplingParams = SamplingParams(temperature=0.0)
    tool_format: ToolFormat | None = HERMES
    vision_mode: str = "isolated"
    blend_tokens: int | None = None
    image_details: Mapping[str, int] = field(default_factory=dict)
    image_crops: Mapping[str, int] | None = None


class FakeMetrics:
    def render(self) -> bytes:
        return b"# fake engine\n"

    def values(self) -> dict[str, float]:
        return {"mmserve:generation_tokens_total": 7.0}


def _padded(owners: list[int]) -> array[int]:
    return array("i", owners + [FREE] * max(64 - len(owners), 0))


def named(data: bytes, tenant: Tenant) -> bytes:
    """An image's digest."""
    return hashlib.sha256(tenant.salt + data).digest()


def encode(text: str) -> tuple[int, ...]:
    return tuple(text.encode("utf-8"))


class FakeGeneration:
    """Yields one word an event, as far as its engine's `hold_at` lets it."""

    def __init__(
        self,
        engine: FakeEngine,
        id: str,
        prompt: Prompt,
        params: SamplingParams,
        prefill_only: bool,
    ) -> None:
        self.id = id
        self._engine = engine
        self._prompt = prompt
        self._params = params
        self._prefill_only = prefill_only
        self._aborted = asyncio.Event()
        engine.running.add(id)

    def abort(self) -> None:
        if self.id in self._engine.running:
            self._engine.aborted.append(self.id)
            self._engine.running.discard(self.id)
        self._aborted.set()

    def _end(self, reason: FinishReason, count: int, error: str | None = None) -> TokenEvent:
        images = [s for s in self._prompt.segments if isinstance(s, ImageSegment)]
        usage = Usage(
            prompt_tokens=self._prompt.num_tokens,
            image_tokens=self._prompt.num_image_tokens,
            completion_tokens=count,
            vision_misses=len(images),
            vision_mode="blend" if self._engine.info.vision_mode == "blend" else None,
        )
        return TokenEvent(
            finish_reason=reason, usage=usage, timings=Timings(prompt_ms=1.0), error=error
        )

    async def _aborted_before(self, word: int) -> bool:
        """Wait until word number `word` may be said; True when aborted meanwhile."""
        await asyncio.sleep(0)  # readers hear each word before the next
        while self._engine.holds(self.id, word) and not self._aborted.is_set():
            await asyncio.sleep(LOOK_S)
        return self._aborted.is_set()

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        async for event in self._events():
            if event.finish_reason is not None:
                self._engine.running.discard(self.id)
            yield event

    async def _events(self) -> AsyncIterator[TokenEvent]:
        if self._prefill_only:
            aborted = await self._aborted_before(0)
            yield self._end(FinishReason.ABORT if aborted else FinishReason.STOP, 0)
            return
        limit = self._params.max_tokens
        summary = self.id.startswith("summary")
        said = self._engine.summary if summary else self._engine.answer(self._prompt)
        words = re.findall(r"\s*\S+", said)
        for count, word in enumerate(words):
            if limit is not None and count == limit:
                yield self._end(FinishReason.LENGTH, count)
                return
            if await self._aborted_before(count):
                yield self._end(FinishReason.ABORT, count)
                return
            broken = self._engine.broken
            if "crash" in word or (broken is not None and self.id.startswith(broken)):
                event = self._end(FinishReason.ERROR, count, "the engine tripped")
                yield replace(event, code=self._engine.ending)
                return
            logprobs: tuple[TokenLogprob, ...] = ()
            if self._params.logprobs is not None:
                top = tuple((i, f"t{i}", -1.0 - i) for i in range(self._params.logprobs))
                logprobs = (TokenLogprob(1, word, -0.5, top),)
            yield TokenEvent(text=word, token_ids=encode(word), logprobs=logprobs)
        yield self._end(FinishReason.STOP, len(words))


@dataclass
class FakeEngine:
    """`script`: the answer to every prompt; otherwise the last message is echoed.

    `hold_at`: the number of words after which every generation whose id begins with `held` waits
    until this is raised or None. `broken`: generations whose ids begin so fail.
    """

    info: FakeInfo = field(default_factory=FakeInfo)
    metrics: FakeMetrics = field(default_factory=FakeMetrics)
    status: str = "ok"
    hold_at: int | None = None
    held: str = ""
    broken: str | None = None
    summary: str = "they met"
    script: str | None = None
    queue_full: bool = False
    ending: str | None = None  # the code of what fails
    gone: str | None = None  # why it can never compute again
    num_shrunk: int = 0
    num_prepared: int = 0
    running: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    prompts: list[list[Any]] = field(default_factory=list)
    prefills: list[list[Message]] = field(default_factory=list)  # those of them without an answer
    params: list[SamplingParams] = field(default_factory=list)
    durable: list[bool] = field(default_factory=list)
    tenants: list[Tenant] = field(default_factory=list)  # who asked for each
    streaming: list[Streaming | None] = field(default_factory=list)
    pinned: set[ImageId] = field(default_factory=set)
    max_pinned: int = 4
    ids: list[str] = field(default_factory=list)
    num_looks: int = 0  # at the pools
    dropped: set[bytes] = field(default_factory=set)
    prepared: list[tuple[tuple[Any, ...], Constraint | None]] = field(default_factory=list)
    _last: dict[int, tuple[Prompt, list[Message]]] = field(default_factory=dict, repr=False)

    async def start(self) -> None: ...
    async def stop(self) -> None: ...

    async def lost(self) -> str:
        while self.gone is None:
            await asyncio.sleep(10 * LOOK_S)
        self.status = "dead"
        return self.gone

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def stages(self) -> dict[str, Any]:
        return {}

    def shrink(self) -> None:
        self.num_shrunk += 1

    def _image(self, part: ImagePart, tenant: Tenant) -> ImageSegment:
        limits = self.info.image_limits
        if len(part.data) > limits.max_bytes:
            raise ImageTooLargeError("The image is too large.", param=part.param)
        if not part.data.startswith((PNG, b"\xff\xd8\xff", b"GIF8", b"RIFF")):
            raise UnsupportedImageTypeError("Not an image.", param=part.param)
        if part.data.endswith(b"broken"):
            raise InvalidImageError("The image is cut short.", param=part.param)
        digest = named(part.data, tenant)
        return ImageSegment(ImageInput(digest, part.data, IMAGE_TOKENS), part.state == "marked")

    async def prepare(
        self,
        messages: Sequence[Message],
        *,
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        constraint: Constraint | None = None,
        tenant: Tenant = EVERYBODY,
    ) -> Prompt:
        self.num_prepared += 1
        self.prepared.append((tuple(tools), constraint))
        await asyncio.sleep(0)
        segments: list[Segment] = []
        for message in messages:
            segments.append(TextSegment(encode(f"<{message.role}>")))
            for part in message.parts:
                if isinstance(part, ImagePart):
                    segments += [self._image(part, tenant)] if part.state != "gone" else []
                elif isinstance(part, TokensPart):
                    segments.append(TextSegment(part.token_ids))
                else:
                    segments.append(TextSegment(encode(part.text)))
        images = sum(isinstance(s, ImageSegment) and not s.marked for s in segments)
        if images > self.info.image_limits.max_images:
            raise TooManyImagesError(f"{images} images are too many.", param="messages")
        text = sum(len(s.token_ids) for s in segments if isinstance(s, TextSegment))
        prompt = Prompt(tuple(segments), text, images * IMAGE_TOKENS)
        if prompt.num_tokens >= self.info.max_model_len:
            raise ContextLengthExceededError(
                f"The prompt has {prompt.num_tokens} tokens; the limit is "
                f"{self.info.max_model_len}."
            )
        self._last[id(prompt)] = (prompt, list(messages))
        return prompt

    async def identify(self, data: bytes, tenant: Tenant = EVERYBODY) -> ImageId:
        return ImageId((named(data, tenant),), (IMAGE_TOKENS,))

    async def held_images(self, images: Sequence[ImageId]) -> list[HeldImage]:
        """Every image of a prompt that was submitted is there."""
        hits = {key: count - 1 for key, count in Counter(self._shown()).items()}
        held = []
        for image in images:
            (digest,), pinned = image.digests, image in self.pinned
            if digest in hits:
                state = HeldImage("active", IMAGE_TOKENS, 1024, hits[digest], pinned)
            else:
                state = HeldImage(num_tokens=IMAGE_TOKENS, pinned=pinned)
            held.append(state)
        return held

    async def pin_image(self, image: ImageId) -> None:
        if len(self.pinned | {image}) > self.max_pinned:
            raise PinBudgetExceededError(f"{self.max_pinned} images may be pinned.")
        self.pinned.add(image)

    def unpin_image(self, image: ImageId) -> None:
        self.pinned.discard(image)

    async def kv_snapshot(self) -> Snapshot:
        """A page for each request, and one for each image that was shown."""
        self.num_looks += 1
        pages = [PrefixOwner(n, None, id, 0, 16, 0) for n, id in enumerate(self.ids)]
        shown = self._images_shown() - self.dropped
        images = [
            ImageOwner(1000 + n, key, self.ids[-1], IMAGE_TOKENS, "ready", 0, 0, False)
            for n, key in enumerate(sorted(shown))
        ]
        pools = (
            PoolPages("text", None, 1024, _padded([o.number for o in pages])),
            PoolPages("vision", None, 1024, _padded([o.number for o in images])),
        )
        return Snapshot(pools, (*pages, *images), 16, len(self.running), 0, 0.0)

    async def drop_image(self, key: bytes) -> bool:
        there = key in self._images_shown() - self.dropped
        self.dropped.add(key)
        return there

    def _shown(self) -> Iterator[bytes]:
        for prompt, tenant in zip(self.prompts, self.tenants, strict=True):
            parts = [p for message in prompt for p in message.parts]
            yield from (named(p.data, tenant) for p in parts if isinstance(p, ImagePart))

    def _images_shown(self) -> set[bytes]:
        return set(self._shown())

    async def count(self, texts: Sequence[str]) -> list[int]:
        return [len(encode(text)) for text in texts]

    async def export_kv(self, path: Path) -> None:
        path.write_bytes(b"all KV")

    async def import_kv(self, path: Path) -> dict[str, Any]:
        if not path.read_bytes().startswith(b"all KV"):
            raise KVRefusedError("The KV file is refused: it is none.", param="file")
        part = {"new": 1, "known": 0, "left_out": 0}
        return {"text": part, "images": part}

    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        prefill_only: bool = False,
        streaming: Streaming | None = None,
        durable: bool = False,
        tenant: Tenant = EVERYBODY,
    ) -> FakeGeneration:
        if self.queue_full:
            raise QueueFullError("The queue is full.")
        if self.status != "ok":
            raise EngineUnavailableError("The engine is not running.")
        self.prompts.append(self._last[id(prompt)][1])
        self.params.append(params)
        self.durable.append(durable)
        self.tenants.append(tenant)
        self.streaming.append(streaming)
        if prefill_only:
            self.prefills.append(self.prompts[-1])
        self.ids.append(request_id)
        return FakeGeneration(self, request_id, prompt, params, prefill_only)

    def holds(self, id: str, word: int) -> bool:
        """Whether a generation must not yet say its word of this number, from 0."""
        limit = self.hold_at
        return limit is not None and word >= limit and id.startswith(self.held)

    def answer(self, prompt: Prompt) -> str:
        if self.script is not None:
            return self.script
        words = []
        for part in self._last[id(prompt)][1][-1].parts:
            if isinstance(part, ImagePart):
                words.append(f"[{hashlib.sha256(part.data).hexdigest()[:8]}]")
            elif isinstance(part, TextPart):
                words.append(part.text)
        return "you said: " + " ".join(words)

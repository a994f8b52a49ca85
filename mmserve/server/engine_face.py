"""The engine as the server sees it.

Owns the structural types the server programs against, so that it imports nothing of the engine and
can be tested with a fake. Refuses to know how a token is made.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mmserve.config import ImageLimits
from mmserve.held_image import HeldImage, ImageId
from mmserve.kv_snapshot import Snapshot
from mmserve.prompt import Message, Prompt
from mmserve.request import EVERYBODY, Constraint, SamplingParams, Streaming, Tenant, TokenEvent
from mmserve.tools import ToolFormat


class ModelInfo(Protocol):
    """What the server tells about the served model."""

    @property
    def name(self) -> str: ...
    @property
    def max_model_len(self) -> int:
        """Tokens, text and image, of prompt and answer together."""

    @property
    def image_tokens(self) -> int:
        """Visual tokens that an image has at least; 0: the model takes no images."""

    @property
    def image_limits(self) -> ImageLimits: ...
    @property
    def created(self) -> int:
        """Unix seconds."""

    @property
    def default_sampling(self) -> SamplingParams:
        """Its temperature, top_p, top_k, min_p and repetition_penalty are used where a request
        names none."""

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model is told of tools and calls them; None where it cannot be."""

    @property
    def vision_mode(self) -> str:
        """How much of what stands before an image it has seen: isolated | prefix | blend."""

    @property
    def blend_tokens(self) -> int | None:
        """In blend mode: how many of an image's first tokens have seen it."""

    @property
    def image_details(self) -> Mapping[str, int]:
        """Visual tokens of an image that is seen whole, by the detail asked for; empty where that
        makes no difference."""

    @property
    def image_crops(self) -> Mapping[str, int] | None:
        """`above` which side in pixels an image is cut up into `most` pieces, if it is."""


class Generation(Protocol):
    """One submitted request: its events end with one that has a finish reason."""

    @property
    def id(self) -> str: ...
    def __aiter__(self) -> AsyncIterator[TokenEvent]: ...
    def abort(self) -> None:
        """Stop within one step; the last event then says ABORT. Harmless after the end."""


class MetricsFace(Protocol):
    def render(self) -> bytes:
        """The Prometheus text exposition."""

    def values(self) -> dict[str, float]:
        """The same, by name. Any thread may ask."""


class EngineFace(Protocol):
    @property
    def info(self) -> ModelInfo: ...
    @property
    def status(self) -> str:
        """loading | ok | restarting | stalled | draining | dead."""

    @property
    def num_running(self) -> int:
        """Generations that have not ended, those that wait included."""

    @property
    def stages(self) -> Mapping[str, Any]:
        """Workers that may compute parts of prompts, by kind; empty where there are none."""

    @property
    def metrics(self) -> MetricsFace: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def lost(self) -> str:
        """Wait, after `start`, until nothing of this process can compute any more; why."""

    def shrink(self) -> None:
        """Soon: give back memory that is held only to save work."""

    async def prepare(
        self,
        messages: Sequence[Message],
        *,
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        constraint: Constraint | None = None,
        tenant: Tenant = EVERYBODY,
    ) -> Prompt:
        """Check and decode images, count tokens. `tools` are what the model is told of; a
        `constraint` that `submit` will bring is compiled. Raises `RequestError`s."""

    async def identify(self, data: bytes, tenant: Tenant = EVERYBODY) -> ImageId:
        """What a tenant's image file is called here. Raises `RequestError` where there are no
        images."""

    async def held_images(self, images: Sequence[ImageId]) -> list[HeldImage]:
        """Where each image's KV is."""

    async def pin_image(self, image: ImageId) -> None:
        """Keep an image's KV in the pool. Raises `PinBudgetExceededError`."""

    def unpin_image(self, image: ImageId) -> None:
        """Soon, and harmless when it is not pinned."""

    async def kv_snapshot(self) -> Snapshot:
        """Whose each page of the pools is."""

    async def drop_image(self, key: bytes) -> bool:
        """Forget an image's KV, of the vision pools alone. False: it is not there, or in use."""

    async def count(self, texts: Sequence[str]) -> list[int]:
        """The tokens of each text by itself."""

    async def export_kv(self, path: Path) -> None:
        """Write all KV that is cached to a file. Raises KVRefusedError."""

    async def import_kv(self, path: Path) -> Mapping[str, Any]:
        """Take a KV file in; what came of it, as JSON. Raises KVRefusedError."""

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
    ) -> Generation:
        """Queue a generation; raises `RequestError`s at once. `streaming`: how it goes on where it
        outgrows itself; its last event's usage says what was dropped. `durable`: what it computes
        may be kept on disk."""

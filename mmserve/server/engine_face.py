"""The engine as the server sees it.

Owns the structural types the server programs against, so that it imports nothing of the engine and
can be tested with a fake. Refuses to know how a token is made.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from mmserve.config import ImageLimits
from mmserve.prompt import Message, Prompt
from mmserve.request import SamplingParams, TokenEvent


class ModelInfo(Protocol):
    """What the server tells about the served model."""

    @property
    def name(self) -> str: ...
    @property
    def max_model_len(self) -> int:
        """Tokens, text and image, of prompt and answer together."""

    @property
    def image_tokens(self) -> int:
        """Visual tokens of one image."""

    @property
    def image_limits(self) -> ImageLimits: ...
    @property
    def created(self) -> int:
        """Unix seconds."""

    @property
    def default_temperature(self) -> float:
        """Used where a request names none."""


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


class EngineFace(Protocol):
    @property
    def info(self) -> ModelInfo: ...
    @property
    def status(self) -> str:
        """loading | ok | draining | dead."""

    @property
    def metrics(self) -> MetricsFace: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def prepare(self, messages: Sequence[Message], *, continue_final: bool = False) -> Prompt:
        """Check and decode images, count tokens. Raises `RequestError`s."""

    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        prefill_only: bool = False,
    ) -> Generation:
        """Queue a generation; raises `RequestError`s at once."""

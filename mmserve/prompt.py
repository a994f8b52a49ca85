"""Chat messages to segments: the one place that knows the chat template and where images stand.

Owns `Message` and its parts, `Prompt`, and `ChatTemplate`. Knows nothing of JSON, HTTP or tensors.
User text never becomes a special token: only the template writes those, by id.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmserve.request import Segment


@dataclass(frozen=True)
class TextPart:
    text: str


@dataclass(frozen=True)
class ImagePart:
    """An encoded image file, and the request field it came from (for error messages)."""

    data: bytes
    param: str | None = None


@dataclass(frozen=True)
class TokensPart:
    """The exact tokens of an earlier answer, so that its KV is found again."""

    token_ids: tuple[int, ...]


Part = TextPart | ImagePart | TokensPart


@dataclass(frozen=True)
class Message:
    role: str  # system | user | assistant | tool
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation, checked and ready to submit."""

    segments: tuple[Segment, ...]
    num_text_tokens: int
    num_image_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.num_text_tokens + self.num_image_tokens

"""Messages as an engine is asked them without a server.

Owns their way through pipeline and template. Knows nothing of what is measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmserve.engine.engine import Engine
from mmserve.prompt import ImagePart, Message, Part, TextPart
from mmserve.request import Segment


def asked(text: str, picture: bytes | None = None) -> Message:
    """By the user, about a picture where there is one."""
    parts: list[Part] = [TextPart(text)]
    if picture is not None:
        parts.insert(0, ImagePart(picture))
    return Message("user", tuple(parts))


def chat(engine: Engine, messages: Sequence[Message]) -> tuple[Segment, ...]:
    parts = (part for message in messages for part in message.parts)
    files = [part.data for part in parts if isinstance(part, ImagePart)]
    images = [engine.pipeline.prepare(file) for file in files]
    return engine.template.render(messages, images).segments

"""A tiny family checkpoint opened at the border, and what transformers' own processor says of it.

Owns the pairing of our template and pipeline with the processor they stand for. Weights and models
are `families`'.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image

from mmserve.config import ImageLimits
from mmserve.engine.hub_images import ProcessorPipeline
from mmserve.hub_prompt import HubTemplate
from mmserve.model.checkpoint import Checkpoint, open_checkpoint
from mmserve.prompt import ImagePart, Message, Prompt, TextPart
from mmserve.request import TextSegment
from mmserve.vision.decoder import DecodeHere
from tests.model import families

Parts = Sequence[str | Image.Image]


@dataclass(frozen=True)
class Border:
    checkpoint: Checkpoint
    template: HubTemplate
    pipeline: ProcessorPipeline | None

    def render(self, *parts: str | Image.Image, **options: Any) -> Prompt:
        """Ours: one user message of texts and pictures."""
        return self.render_all([message("user", *parts)], **options)

    def render_all(self, messages: Sequence[Message], **options: Any) -> Prompt:
        images = [p for m in messages for p in m.parts if isinstance(p, ImagePart)]
        made = [self.see(p.data, alone=len(images) == 1) for p in images]
        return self.template.render(messages, made, **options)

    def see(self, data: bytes, **options: Any) -> Any:
        assert self.pipeline is not None
        return self.pipeline.prepare(data, **options)

    def theirs(self, *parts: str | Image.Image) -> list[int]:
        """transformers' ids of the same message."""
        return ids_of(self.encode(*parts))

    def encode(self, *parts: str | Image.Image) -> dict[str, Any]:
        """All that transformers' processor makes of the same message."""
        processor = self.checkpoint.processor
        if self.checkpoint.name not in families.NO_CHAT_TEMPLATE:
            return families.encode(processor, families.chat(*parts))
        text = "".join(p if isinstance(p, str) else "<image>" for p in parts)
        pictures = [p for p in parts if not isinstance(p, str)]
        if pictures:
            return dict(processor(text=text, images=[pictures], return_tensors="pt"))
        # Its processor demands pictures; without them, this is the form it was trained on.
        bare = f"{processor.tokenizer.bos_token}{text}\n"
        return dict(processor.tokenizer(bare, add_special_tokens=False, return_tensors="pt"))


Open = Callable[[str], Border]


def opener(folder: Path) -> Open:
    """Families by name, each built in the folder and opened once."""

    @cache
    def get(name: str) -> Border:
        return open_border(families.build(name, folder))

    return get


def template_of(checkpoint: Checkpoint, chat_template: str | None = None) -> HubTemplate:
    """The checkpoint's own, or one that takes its place."""
    return HubTemplate(
        checkpoint.processor,
        chat_template=chat_template or checkpoint.chat_templates,
        takes_images=checkpoint.takes_images,
        image_token_id=checkpoint.image_token_id,
    )


def open_border(
    folder: Path, is_resident: Callable[[bytes], bool] = lambda _: False, **options: Any
) -> Border:
    checkpoint = open_checkpoint(str(folder), progress=False, **options)
    template = template_of(checkpoint)
    if not checkpoint.takes_images:
        return Border(checkpoint, template, None)
    pipeline = ProcessorPipeline(
        DecodeHere(ImageLimits()),
        checkpoint.processor,
        template,
        checkpoint.config,
        settings_id=checkpoint.weights_id,
    )
    pipeline.connect(is_resident, lambda: None)
    return Border(checkpoint, template, pipeline)


def message(role: str, *parts: str | Image.Image) -> Message:
    return Message(
        role, tuple(TextPart(p) if isinstance(p, str) else ImagePart(png(p)) for p in parts)
    )


def png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def ids_of(inputs: dict[str, Any]) -> list[int]:
    found: list[int] = inputs["input_ids"][0].tolist()
    return found


def flat(prompt: Prompt) -> list[int]:
    """All ids of a prompt, images' runs in their places."""
    return [
        token
        for segment in prompt.segments
        for token in (
            segment.token_ids if isinstance(segment, TextSegment) else segment.image.token_ids or ()
        )
    ]

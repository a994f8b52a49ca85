"""Chat messages to segments through a public checkpoint's own chat template and tokenizer.

Owns `HubTemplate` and `HubImage`: what a template is given, where its images stand, and the ids,
which are those transformers makes of the same messages. Users' text never becomes a control token
or a picture (see `guarded`). Knows nothing of JSON, HTTP, tensors or image files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from mmserve.errors import RequestError, first_line
from mmserve.guarded import GuardedEncoder, Quotes
from mmserve.prompt import (
    ROLES,
    ImagePart,
    Message,
    Prompt,
    TextPart,
    TokensPart,
    check_messages,
    present_images,
)
from mmserve.request import ImageInput, ImageSegment, Segment, TextSegment
from mmserve.tools import HERMES, ToolFormat

CROSS_ATTENTION = ("MllamaProcessor",)  # an image is one text token, and is looked at by others

_PROBE = "probe text"


@dataclass(frozen=True, eq=False)
class HubImage(ImageInput):
    """An image with the text that its processor writes around its visual tokens.

    An image that is looked at by cross-attention has no tokens in the text (`token_ids` empty,
    `span` 0): it stands before its placeholder, which stays a text token.

    `alone`: made as the only image of its prompt (or as one of several), where that changes what
    the processor makes of it; None where it does not.
    """

    before: str = ""
    after: str = ""
    alone: bool | None = None


class HubTemplate:
    """The face of `ChatTemplate` for a transformers checkpoint. Thread-safe."""

    def __init__(
        self,
        processor: Any,
        *,
        chat_template: str | Mapping[str, str],
        takes_images: bool = False,
        image_token_id: int | None = None,
    ) -> None:
        """`processor` is the checkpoint's, or its tokenizer when it takes no images; a mapping of
        templates has `default` and maybe `tool_use`. Raises ValueError for a template or tokenizer
        that cannot be used."""
        self._templates = (
            {"default": chat_template} if isinstance(chat_template, str) else dict(chat_template)
        )
        if "default" not in self._templates:
            raise ValueError(f"no default among the chat templates {', '.join(self._templates)}")
        self._processor = processor
        self._tokenizer = getattr(processor, "tokenizer", processor)
        self._is_processor = self._tokenizer is not processor
        kind = type(processor).__name__
        self._finish = _FINISHES.get(kind, _as_it_is)
        self.cross_attention = kind in CROSS_ATTENTION
        self.takes_images = takes_images
        self.image_token_id = image_token_id
        self.image_token = ""
        placeholders: list[str] = []
        if takes_images:
            if image_token_id is None:
                raise ValueError("the model's config names no image token")
            self.image_token = self._tokenizer.convert_ids_to_tokens(image_token_id)
            named_tokens = (getattr(processor, n, None) for n in ("boi_token", "image_token"))
            placeholders = [str(t) for t in named_tokens if t] or [self.image_token]
        self._try_template()
        self._encoder = _encoder(processor, self._tokenizer, self._templates.values(), placeholders)
        self.placeholder = self._probe_image(placeholders) if takes_images else ""
        self._strings = {role for role in ("system", "user") if self._reads(role, listed=False)}
        self._lists = {role for role in ("system", "user") if self._reads(role, listed=True)}

    def render(
        self,
        messages: Sequence[Message],
        images: Sequence[ImageInput],
        *,
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Prompt:
        """The conversation as segments; images[i] is the i-th of `present_images`. An image that is
        gone is left out, because templates have no numbers for them.

        Ends with the opening of the assistant's turn, or, with `continue_final`, inside the last
        message, which must be the assistant's. `tools` are function descriptions for the template.
        Raises `RequestError` for what the template, or the model, does not take.
        """
        check_messages(messages, continue_final)
        for part in (part for message in messages for part in message.parts):
            if isinstance(part, ImagePart) and not self.takes_images:
                raise RequestError("this model takes no images", param=part.param)
        quotes = self._quotes(messages)
        conversation = [self._message(message, quotes) for message in messages]
        text = self._write(conversation, quotes.tree(list(tools)) or None, continue_final)
        adds = self._adds_first(text)
        text = self._finish(self._place(text, images), self._tokenizer, self.image_token)
        ids = self._encoder.encode(text, quotes, add_special_tokens=adds)
        marked = [part.state == "marked" for part in present_images(messages)]
        return self._prompt(ids, list(zip(images, marked, strict=True)))

    @property
    def tool_format(self) -> ToolFormat | None:
        """The one form known here, where the template tells the model of it."""
        return HERMES if any(map(_tells_of_hermes, self._templates.values())) else None

    def expand(self, text: str) -> str:
        """What becomes of a text with placeholders but for the images' own tokens."""
        return self._finish(text, self._tokenizer, self.image_token)

    def write(self, messages: Sequence[Message]) -> tuple[str, bool]:
        """The template's text with placeholders, and whether the tokenizer is to add its first
        token to it."""
        quotes = self._quotes(messages)
        text = self._write([self._message(message, quotes) for message in messages])
        return text, self._adds_first(text)

    def _quotes(self, messages: Sequence[Message]) -> Quotes:
        parts = (part for message in messages for part in message.parts)
        return self._encoder.quotes([part.text for part in parts if isinstance(part, TextPart)])

    def _adds_first(self, text: str) -> bool:
        """As in transformers: a tokenizer's template writes all special tokens itself; a processor
        adds the first one where its template did not."""
        first = self._tokenizer.bos_token
        return self._is_processor and not (first is not None and text.startswith(first))

    def _message(self, message: Message, quotes: Quotes) -> dict[str, Any]:
        """As templates take it: content is a string, or a list of text and image items."""
        role, own = ROLES[message.role], message.role == "assistant"
        items: list[dict[str, str]] = []
        for part in message.parts:
            if isinstance(part, ImagePart):
                items += [{"type": "image"}] if part.state != "gone" else []
            elif isinstance(part, TokensPart):
                # An image token that the model said shows no picture, and would be taken for one.
                said = [token for token in part.token_ids if token != self.image_token_id]
                items.append({"type": "text", "text": quotes.answer(said)})
            else:
                items.append({"type": "text", "text": quotes.text(part.text, own=own)})
        kind = "system" if role == "system" else "user"  # a template reads all turns alike
        one = len(items) < 2 and all(item["type"] == "text" for item in items)
        if kind in self._strings and (one or kind not in self._lists):
            shown = [item.get("text", self.placeholder) for item in items]
            return {"role": role, "content": "\n".join(shown)}
        return {"role": role, "content": items}

    def _write(
        self,
        conversation: Sequence[dict[str, Any]],
        tools: list[Any] | None = None,
        continue_final: bool = False,
    ) -> str:
        named = self._templates.get("tool_use") if tools else None
        try:
            return str(
                self._processor.apply_chat_template(
                    list(conversation),
                    chat_template=named or self._templates["default"],
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=not continue_final,
                    continue_final_message=continue_final,
                )
            )
        except jinja2.TemplateError as error:
            raise RequestError(
                f"The model's chat template does not take these messages: {error}", param="messages"
            ) from error
        except (TypeError, ValueError, KeyError) as error:
            raise RequestError(
                f"The model's chat template cannot show these messages: {first_line(error)}",
                param="messages",
            ) from error

    def _place(self, text: str, images: Sequence[ImageInput]) -> str:
        """Each placeholder as its image's run, the run itself cut down to one image token.

        An image token parts texts whatever stands on its other side, so the ids around are the
        same as with the whole run.
        """
        if not self.takes_images:
            return text
        pieces = text.split(self.placeholder)
        slots = len(pieces) - 1
        if slots != len(images):
            raise RequestError(
                f"The messages hold {len(images)} images, and the model's chat template shows "
                f"{slots} of them.",
                param="messages",
            )
        out = pieces[:1]
        for image, piece in zip(images, pieces[1:], strict=True):
            assert isinstance(image, HubImage)
            assert image.alone in (None, slots == 1), "an image made for another number of images"
            out += (image.before, self.image_token, image.after, piece)
        return "".join(out)

    def _prompt(self, ids: Sequence[int], images: Sequence[tuple[ImageInput, bool]]) -> Prompt:
        """`images`: each with whether it is marked."""
        segments: list[Segment] = []
        text: list[int] = []
        slots = sum(token == self.image_token_id for token in ids)
        if slots != len(images):
            raise RequestError(
                f"The messages hold {len(images)} images, and the model's chat template makes "
                f"{slots} image tokens of them.",
                param="messages",
            )
        rest = iter(images)
        for token in ids:
            if token == self.image_token_id:
                if text:
                    segments.append(TextSegment(tuple(text)))
                segments.append(ImageSegment(*next(rest)))
                text = [token] if self.cross_attention else []
            else:
                text.append(token)
        if text:
            segments.append(TextSegment(tuple(text)))
        return Prompt(
            segments=tuple(segments),
            num_text_tokens=sum(len(s.token_ids) for s in segments if isinstance(s, TextSegment)),
            num_image_tokens=sum(image.num_tokens for image, marked in images if not marked),
        )

    # -- what the template understands, found by trying it ---------------------------------------

    def _try_template(self) -> None:
        for name, text in self._templates.items():
            try:
                self._processor.apply_chat_template(
                    [{"role": "user", "content": _PROBE}], chat_template=text, tokenize=False
                )
            except jinja2.TemplateSyntaxError as error:
                raise ValueError(
                    f"the {name} chat template cannot be read: line {error.lineno}: {error.message}"
                ) from error
            except Exception:  # it may want other messages than this one
                continue

    def _reads(self, role: str, listed: bool) -> bool:
        """Whether it shows a text given as a plain string, or as a list of one item."""
        content: Any = [{"type": "text", "text": _PROBE}] if listed else _PROBE
        conversation = [{"role": role, "content": content}]
        if role == "system":
            user = self._reads("user", listed=True) and not self._reads("user", listed=False)
            asked: Any = [{"type": "text", "text": "hello"}] if user else "hello"
            conversation.append({"role": "user", "content": asked})
        try:
            text = self._write(conversation)
        except RequestError:
            return False
        return _PROBE in text and "'type'" not in text

    def _probe_image(self, placeholders: Sequence[str]) -> str:
        """Which of the processor's tokens the template writes for an image."""
        items = [{"type": "image"}, {"type": "text", "text": _PROBE}]
        try:
            text = self._write([{"role": "user", "content": items}])
        except RequestError:
            text = ""
        shown = [token for token in placeholders if text.count(token) == 1]
        return shown[0] if shown else placeholders[-1]


def _tells_of_hermes(template: str) -> bool:
    """Whether it shows tools, and calls as `Hermes` writes them: JSON between the tags. Others have
    XML there (`<function=...>`, Qwen3-Coder; `<arg_key>`, GLM-4.5)."""
    shown = re.findall(r"<tool_call>(.*?)</tool_call>", template, re.DOTALL)
    keys = [re.compile(rf"""\\?["']{key}\\?["']\s*:""") for key in ("name", "arguments")]
    told = any(all(key.search(call) for key in keys) for call in shown)
    return told and re.search(r"\btools\b", template) is not None


def _encoder(
    processor: Any, tokenizer: Any, templates: Any, placeholders: Sequence[str]
) -> GuardedEncoder:
    names = (f"{kind}_token" for kind in ("image", "video", "audio"))
    control = {str(t) for n in names if (t := getattr(processor, n, None))} | set(placeholders)
    written = "\0".join(templates)
    added = (token.content for token in tokenizer.added_tokens_decoder.values())
    tags = {token for token in added if len(token.strip()) > 2 and token in written}
    return GuardedEncoder(tokenizer.backend_tokenizer, control, tags)


# -- what processors do to a text beyond putting images' runs in place -----------------------------


def _as_it_is(text: str, tokenizer: Any, image: str) -> str:
    return text


def _idefics2(text: str, tokenizer: Any, image: str) -> str:
    """Adjacent images share the token between them; a word after an image is set off by a space."""
    fake = getattr(tokenizer, "image_boundary_token", "<fake_token_around_image>")
    return re.sub(rf"{re.escape(fake)}(?=[^\s<])", f"{fake} ", text.replace(fake * 2, fake))


def _paligemma(text: str, tokenizer: Any, image: str) -> str:
    """The first token comes after the last image, and a newline ends the prompt."""
    end = text.rfind(image) + len(image) if image in text else 0
    return f"{text[:end]}{tokenizer.bos_token}{text[end:]}\n"


def _mllama(text: str, tokenizer: Any, image: str) -> str:
    """The first token is written after leading images, unless the template wrote one."""
    first = str(tokenizer.bos_token)
    if first in text:
        return text
    rest = text
    while rest.startswith(image):
        rest = rest.removeprefix(image)
    return text[: len(text) - len(rest)] + first + rest


_FINISHES: dict[str, Callable[[str, Any, str], str]] = {
    "Idefics2Processor": _idefics2,
    "PaliGemmaProcessor": _paligemma,
    "MllamaProcessor": _mllama,
}

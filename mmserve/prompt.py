"""Chat messages to segments: the one place that knows the chat template and where images stand.

Owns `Message` and its parts, `Prompt`, and `ChatTemplate`. Knows nothing of JSON, HTTP or tensors.
User text never becomes a special token: only the template writes those, by id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mmserve.errors import RequestError
from mmserve.request import ImageInput, ImageSegment, Segment, TextSegment
from mmserve.tokenizer import Tokenizer
from mmserve.tools import HERMES, ToolFormat


@dataclass(frozen=True)
class TextPart:
    text: str


@dataclass(frozen=True)
class ImagePart:
    """An encoded image file, and the request field it came from (for error messages).

    `earlier`: sent with an earlier request of the conversation; it does not count against the
    limit of images in one request. `number`: what it is called in the conversation; None: one more
    than the image before it. `state`: "marked" images are forgotten but by text that saw them;
    of one that is "gone" only the number is said, and `data` may be empty. `detail`: how finely it
    is looked at, where the model has a choice.
    """

    data: bytes
    param: str | None = None
    earlier: bool = False
    number: int | None = None
    state: Literal["shown", "marked", "gone"] = "shown"
    detail: str = "auto"  # auto | low | high | original


@dataclass(frozen=True)
class TokensPart:
    """The exact tokens of an earlier answer, so that its KV is found again."""

    token_ids: tuple[int, ...]


Part = TextPart | ImagePart | TokensPart


@dataclass(frozen=True)
class Message:
    role: str  # system | developer | user | assistant | tool
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


ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def check_messages(messages: Sequence[Message], continue_final: bool) -> None:
    """What every template asks of a conversation. Raises `RequestError` when there is no message, a
    role is unknown or there is nothing to continue."""
    if not messages:
        raise RequestError("messages is empty; at least one is needed", param="messages")
    for i, message in enumerate(messages):
        if message.role not in ROLES:
            raise RequestError(
                f"role {message.role!r} is none of {', '.join(ROLES)}",
                param=f"messages[{i}].role",
            )
    if continue_final and messages[-1].role != "assistant":
        raise RequestError(
            "only a last message of role 'assistant' can be continued", param="messages"
        )


def present_images(messages: Sequence[Message]) -> list[ImagePart]:
    """The images that are looked at, or once were, in order: all that are not gone."""
    parts = (part for message in messages for part in message.parts)
    return [part for part in parts if isinstance(part, ImagePart) and part.state != "gone"]


def image_numbers(messages: Sequence[Message]) -> list[int]:
    """What each image is called, in order: its own number, or one more than the one before."""
    numbers: list[int] = []
    for part in (part for message in messages for part in message.parts):
        if isinstance(part, ImagePart):
            numbers.append(part.number or (numbers[-1] if numbers else 0) + 1)
    return numbers


class ChatTemplate:
    """The ChatML form: `<|im_start|>role`, newline, content, `<|im_end|>`, newline.

    An image is written `image_prefix` (with its number {k}, see `image_numbers`), its
    visual tokens, and `image_suffix`. The suffix separates: it ends a text that stands before an
    image, and precedes whatever follows one, in the same message; a message may end in an image.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        system: str | None = (
            "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        ),
        image_prefix: str = "Image {k}: ",
        image_suffix: str = "\n",
    ) -> None:
        """`system` is said when a conversation does not begin with a system message."""
        self._tokenizer = tokenizer
        self._system = system
        self._image_prefix = image_prefix
        self._image_suffix = image_suffix
        self._start = tokenizer.special("<|im_start|>")
        self._end = tokenizer.special("<|im_end|>")

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model is told of tools and calls them; None: it cannot be."""
        return HERMES

    def render(
        self,
        messages: Sequence[Message],
        images: Sequence[ImageInput],
        *,
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Prompt:
        """The conversation as segments; images[i] is the i-th of `present_images`.

        Ends with the opening of the assistant's turn, or, with `continue_final`, inside the last
        message, which must be the assistant's. `tools` (see `Tool.described`) stand at the end of
        the first system message. Raises `RequestError` when there is no message, a
        role is unknown or there is nothing to continue.
        """
        check_messages(messages, continue_final)
        numbers, rest = iter(image_numbers(messages)), iter(images)
        assert len(images) == len(present_images(messages))

        out = _PromptWriter(self._tokenizer)
        if ROLES[messages[0].role] != "system" and (tools or self._system is not None):
            own = (TextPart(self._system),) if self._system else ()
            messages = [Message("system", own), *messages]
        described = HERMES.describe(tools) if tools else ""
        for i, message in enumerate(messages):
            role = ROLES[message.role]
            before, after = HERMES.result() if tools and role == "tool" else ("", "")
            self._open(out, role)
            out.text(before)
            self._content(out, message, numbers, rest)
            out.text(after)
            if described and i == 0:
                out.text(f"\n\n{described}" if message.parts else described)
            if not (continue_final and i == len(messages) - 1):
                self._close(out)
        if not continue_final:
            self._open(out, "assistant")
        return out.prompt()

    def _open(self, out: _PromptWriter, role: str) -> None:
        out.tokens([self._start])
        out.text(f"{role}\n")

    def _close(self, out: _PromptWriter) -> None:
        out.tokens([self._end])
        out.text("\n")

    def _content(
        self,
        out: _PromptWriter,
        message: Message,
        numbers: Iterator[int],
        images: Iterator[ImageInput],
    ) -> None:
        """Writes a message's parts; takes what it needs of the numbers and of the images."""
        before: Part | None = None
        for part in message.parts:
            if isinstance(part, TextPart) and not part.text:
                continue
            out.text(self._separator(before, part))
            if isinstance(part, TextPart):
                out.text(part.text)
            elif isinstance(part, ImagePart):
                out.text(self._image_prefix.format(k=next(numbers)))
                if part.state != "gone":
                    out.image(next(images), marked=part.state == "marked")
            else:
                # An answer that ended its turn brings the end token; the template writes it too.
                ids = part.token_ids
                out.tokens(ids[:-1] if ids and ids[-1] == self._end else ids)
            before = part

    def _separator(self, before: Part | None, part: Part) -> str:
        """What stands between two parts of one message."""
        suffix = self._image_suffix
        if before is None:
            return ""
        if isinstance(before, ImagePart):
            return suffix
        if isinstance(part, ImagePart):
            ended = isinstance(before, TextPart) and before.text.endswith(suffix)
            return "" if ended else suffix
        if isinstance(before, TextPart) and isinstance(part, TextPart):
            return "\n"
        return ""


class _PromptWriter:
    """Collects text, exact tokens and images; each run of text is encoded as a whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text: list[str] = []
        self._ids: list[int] = []
        self._segments: list[Segment] = []

    def text(self, text: str) -> None:
        self._text.append(text)

    def tokens(self, token_ids: Sequence[int]) -> None:
        self._encode_text()
        self._ids.extend(token_ids)

    def image(self, image: ImageInput, *, marked: bool) -> None:
        self._end_segment()
        self._segments.append(ImageSegment(image, marked))

    def prompt(self) -> Prompt:
        self._end_segment()
        texts = [s for s in self._segments if isinstance(s, TextSegment)]
        images = [s for s in self._segments if isinstance(s, ImageSegment)]
        return Prompt(
            segments=tuple(self._segments),
            num_text_tokens=sum(len(s.token_ids) for s in texts),
            num_image_tokens=sum(s.image.num_tokens for s in images if not s.marked),
        )

    def _encode_text(self) -> None:
        if text := "".join(self._text):
            self._ids.extend(self._tokenizer.encode(text))
        self._text = []

    def _end_segment(self) -> None:
        self._encode_text()
        if self._ids:
            self._segments.append(TextSegment(tuple(self._ids)))
        self._ids = []

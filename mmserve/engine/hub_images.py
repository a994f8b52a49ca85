"""From the bytes of an image to what a public checkpoint's own processor makes of it.

Owns identity and processing of images for models that transformers defines: the digest comes first,
and an image that is known and whose KV is in the pool is neither decoded nor processed. Knows
nothing of sessions, queues, KV or message templates. Thread-safe.
"""

from __future__ import annotations

import copy
import io
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from PIL import Image

from mmserve.errors import ImageTooLargeError, InvalidImageError, RequestError, first_line
from mmserve.held_image import ImageId
from mmserve.hub_prompt import HubImage, HubTemplate
from mmserve.model.fetch import ModelUnavailableError
from mmserve.prompt import ImagePart, Message, TextPart
from mmserve.request import ImageInput, TextSegment
from mmserve.vision import preprocess
from mmserve.vision.decoder import Decoder

# What a processor returns for the text; the rest is the image's.
_TEXT_OUTPUTS = {
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "mm_token_type_ids",
    "labels",
    "cross_attention_mask",
}

# Qwen's own limit, for all: a processor that resizes by the shortest side would make 336 x 5.5
# million pixels (13 GB) of a strip of 1 x 16384 before it crops.
MAX_ASPECT = 200


@dataclass(frozen=True)
class _Facts:
    """What does not need pixels, and is remembered by digest."""

    num_tokens: int
    token_ids: tuple[int, ...]
    span: int | None
    positions: Any  # int64 [3, num_tokens], or None
    before: str
    after: str


class ProcessorPipeline:
    """The face of `VisionPipeline`."""

    def __init__(
        self,
        decoder: Decoder,
        processor: Any,
        template: HubTemplate,
        config: Any,
        *,
        settings_id: bytes,
        max_known: int = 4096,
    ) -> None:
        """`config` is the model's; `settings_id` stands for weights, dtype and whatever else KV
        depends on. Raises `ModelUnavailableError` when the processor writes images into a text in
        a way that is not known here."""
        self.limits = decoder.limits
        self.decoder = decoder
        self.connect(lambda _: False, lambda: None)
        self._processor = processor
        self._template = template
        self._config = config
        assert template.image_token_id is not None
        self._image_id = template.image_token_id
        self._text_lock = threading.Lock()  # transformers' tokenizers are set up anew by each call
        self._known: OrderedDict[bytes, _Facts] = OrderedDict()
        self._known_lock = threading.Lock()
        self._max_known = max_known
        self.settings_id = preprocess.fingerprint(
            ("settings", settings_id),
            ("processor", processor.to_json_string().encode()),
            ("transformers", transformers.__version__.encode()),
        )
        probe = Image.new("RGB", (96, 64), "grey")
        try:
            alone, _ = self._process(probe, alone=True)
            several, _ = self._process(probe, alone=False)
            # LLaVA-OneVision cuts an image into tiles only when it is the only one.
            self.counts_company = alone.token_ids != several.token_ids
            self._check_against_processor()
        except (RequestError, ValueError) as error:
            raise ModelUnavailableError(
                f"{type(processor).__name__} does not take a few small images: {first_line(error)}"
            ) from error

    def connect(self, is_resident: Callable[[bytes], bool], on_decode: Callable[[], None]) -> None:
        """To an engine; before that no image is resident."""
        self.is_resident = is_resident
        self.on_decode = on_decode

    def prepare(
        self,
        data: bytes,
        param: str | None = None,
        *,
        alone: bool = True,
        salt: bytes = b"",
        detail: str = "auto",
    ) -> HubImage:
        """Check and identify one image; decode and process it unless its KV and shape are known.

        `alone`: it is the only image of its prompt; `detail` makes no difference: sizes are the
        processor's. Raises InvalidImageError,
        UnsupportedImageTypeError or ImageTooLargeError with `param`.
        """
        try:
            header = preprocess.check_header(data, self.limits)
            self._check_shape(header.width, header.height)
            alone = alone or not self.counts_company
            digest = self._digest(data, alone, salt)
            facts, inputs = self._recall(digest), None
            if facts is None or not self.is_resident(digest):
                facts, inputs = self._process(self._decode(data), alone)
                self._remember(digest, facts)
        except RequestError as error:
            error.param = param
            raise
        except ValueError as error:  # too narrow, too long: the processor's own limits
            raise InvalidImageError(
                f"The model's image processor does not take the image: {first_line(error)}",
                param=param,
            ) from error
        return HubImage(
            digest=digest,
            data=data,
            num_tokens=facts.num_tokens,
            token_ids=facts.token_ids,
            inputs=inputs,
            positions=facts.positions,
            span=facts.span,
            before=facts.before,
            after=facts.after,
            alone=alone if self.counts_company else None,
        )

    def close(self) -> None:
        self.decoder.close()

    def identify(self, data: bytes, salt: bytes = b"") -> ImageId:
        """What an image file is called, without looking at it."""
        company = (True, False) if self.counts_company else (True,)
        digests = tuple(self._digest(data, alone, salt) for alone in company)
        known = [self._recall(digest) for digest in digests]
        most = max((facts.num_tokens for facts in known if facts is not None), default=None)
        if most is None:
            return ImageId(digests)
        return ImageId(digests, tuple(facts.num_tokens if facts else most for facts in known))

    def pixels(self, image: ImageInput) -> Mapping[str, Any]:
        """The processor's tensors; processes again if the KV was evicted after `prepare`."""
        if image.inputs is not None:
            found: Mapping[str, Any] = image.inputs
            return found
        assert isinstance(image, HubImage)
        return self._process(self._decode(image.data), image.alone is not False)[1]

    def _check_against_processor(self) -> None:
        """A conversation of three images, ours against the processor's own ids.

        What a processor does to a text is its own code; the rules here are known to be right for
        the families in the tests, and are tried on whatever else is loaded.
        """
        pictures = [Image.new("RGB", size, "grey") for size in ((96, 64), (64, 96), (64, 64))]
        parts: list[Image.Image | str] = [pictures[0], "\nOne. ", pictures[1], pictures[2], "two"]
        message = Message(
            "user", tuple(TextPart(p) if isinstance(p, str) else ImagePart(b"") for p in parts)
        )
        text, adds_first = self._template.write([message])
        made = self._processor(text=[text], images=[pictures], add_special_tokens=adds_first)
        images = [self.prepare(_png(picture), alone=False) for picture in pictures]
        prompt = self._template.render([message], images)
        ours = [
            token
            for s in prompt.segments
            for token in (s.token_ids if isinstance(s, TextSegment) else s.image.token_ids or ())
        ]
        if ours != [int(token) for token in made["input_ids"][0]]:
            raise ModelUnavailableError(
                f"{type(self._processor).__name__} writes several images into a text in a way that "
                "is not known here"
            )

    def _check_shape(self, width: int, height: int) -> None:
        """Bounds what the processor may make of an image before it crops."""
        short, long = sorted((width, height))
        if long > MAX_ASPECT * short:
            raise ImageTooLargeError(
                f"The image is {width}x{height} pixels, one side {long / short:g} times the other; "
                f"the limit is {MAX_ASPECT} times."
            )
        size = getattr(self._processor.image_processor, "size", None) or {}
        edge = size.get("shortest_edge")
        if edge is None or size.get("longest_edge") is not None:
            return  # each processor with both keeps its result between them
        resized = edge * edge * long // short
        if resized > self.limits.max_pixels:
            raise ImageTooLargeError(
                f"The image's processor would make {resized / 1e6:.1f} megapixels of its "
                f"{width}x{height} pixels; the limit is {self.limits.max_pixels / 1e6:g}."
            )

    def _digest(self, data: bytes, alone: bool, salt: bytes) -> bytes:
        company = b"" if alone else b"several"
        settings = preprocess.fingerprint(("settings", self.settings_id), ("company", company))
        return preprocess.digest(data, settings, preprocess.FULL_DECODING, salt=salt)

    def _decode(self, data: bytes) -> Image.Image:
        self.on_decode()
        return self.decoder.decode_full(data)

    def _recall(self, digest: bytes) -> _Facts | None:
        with self._known_lock:
            if digest in self._known:
                self._known.move_to_end(digest)
            return self._known.get(digest)

    def _remember(self, digest: bytes, facts: _Facts) -> None:
        with self._known_lock:
            self._known[digest] = facts
            if len(self._known) > self._max_known:
                self._known.popitem(last=False)

    def _process(self, image: Image.Image, alone: bool) -> tuple[_Facts, dict[str, Any]]:
        """One image through the processor, in a text of nothing but its placeholder.

        An image that is not alone is processed beside itself, and the first of the two is kept.
        """
        count = 1 if alone else 2
        text = "\n" + f"{self._template.placeholder}\n" * count
        heard = _Hearing(self._processor.tokenizer, self._text_lock)
        processor = copy.copy(self._processor)
        processor.tokenizer = heard
        made = processor(text=[text], images=[[image] * count], return_tensors="pt")
        inputs = {k: v for k, v in made.items() if k not in _TEXT_OUTPUTS}
        if not alone:
            inputs = {k: _first(k, v) for k, v in inputs.items()}
        ids = [int(token) for token in made["input_ids"][0]]
        before, after = self._around(heard.text, text)
        places = [i for i, token in enumerate(ids) if token == self._image_id]
        if self._template.cross_attention:
            return self._crossed(inputs, before, after), inputs
        per_image, odd = divmod(len(places), count)
        if not per_image or odd:
            raise ModelUnavailableError(
                f"{type(self._processor).__name__} made {len(places)} image tokens of {count} "
                "equal images"
            )
        run = tuple(ids[places[0] : places[per_image - 1] + 1])
        positions, span = _grid_positions(self._config, inputs)
        return _Facts(len(run), run, span, positions, before, after), inputs

    def _around(self, expanded: str, text: str) -> tuple[str, str]:
        """What the processor wrote before and after the first image's own tokens.

        Found by comparing its text with the one it was given, which may have got other additions.
        """
        token, placeholder = self._template.image_token, self._template.placeholder
        given = self._template.expand(text)
        head = given[: given.index(placeholder)]
        tail = given[given.rindex(placeholder) + len(placeholder) :]
        made_head = expanded[: expanded.index(token)]
        made_tail = expanded[expanded.rindex(token) + len(token) :]
        if not made_head.startswith(head) or not made_tail.endswith(tail):
            raise ModelUnavailableError(
                f"{type(self._processor).__name__} writes images into a text in a way that is not "
                "known here"
            )
        return made_head[len(head) :], made_tail[: len(made_tail) - len(tail)]

    def _crossed(self, inputs: Mapping[str, Any], before: str, after: str) -> _Facts:
        """mllama: the tiles in use, each the tower's patches and its class token."""
        vision = self._config.vision_config
        tiles = int(inputs["aspect_ratio_mask"].sum())
        per_tile = (vision.image_size // vision.patch_size) ** 2 + 1
        return _Facts(tiles * per_tile, (), 0, None, before, after)


class NoImagePipeline:
    """The face of `VisionPipeline` for a model that sees nothing."""

    settings_id = b""

    def prepare(self, data: bytes, param: str | None = None, **how: Any) -> HubImage:
        raise RequestError("this model takes no images", param=param)

    def identify(self, data: bytes, salt: bytes = b"") -> ImageId:
        raise RequestError("this model takes no images")

    def pixels(self, image: ImageInput) -> Mapping[str, Any]:
        raise AssertionError("an image of a model that takes none")

    def connect(self, is_resident: Callable[[bytes], bool], on_decode: Callable[[], None]) -> None:
        pass

    def close(self) -> None:
        pass


class _Hearing:
    """A tokenizer that remembers the text it was called with, and is called by one at a time."""

    def __init__(self, tokenizer: Any, lock: threading.Lock) -> None:
        self._tokenizer = tokenizer
        self._lock = lock
        self.text = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        self.text = str(text if isinstance(text, str) else text[0])
        with self._lock:
            return self._tokenizer(text, *args, **kwargs)


def _first(name: str, value: Any) -> Any:
    """The first of two equal images' part of an output, along whichever axis the images are."""
    if name == "batch_num_images" or not isinstance(value, torch.Tensor):
        return value
    if value.shape[0] == 1 and value.dim() > 1:  # [batch, images, ...]
        return value[:, : value.shape[1] // 2]
    return value[: value.shape[0] // 2]


def _png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def _grid_positions(config: Any, inputs: Mapping[str, Any]) -> tuple[Any, int | None]:
    """Of M-RoPE: (time, row, column) of each visual token, int64 [3, n] from 0, and how far the
    image moves what follows; (None, None) for other models."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    grid = inputs.get("image_grid_thw")
    if grid is None or "mrope_section" not in rope:
        return None, None
    merge = config.vision_config.spatial_merge_size
    frames, rows, columns = (int(n) for n in grid[0])
    shape = (frames, rows // merge, columns // merge)
    axes = torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij")
    return torch.stack(axes).reshape(3, -1).numpy(), max(shape[1:])

"""What stands between requests and an engine: its tokenizer, chat template and image pipeline.

Owns the choice between the native composition's and a public checkpoint's own. Knows nothing of
scheduling or KV.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from mmserve.config import EngineConfig
from mmserve.engine.hub_images import NoImagePipeline, ProcessorPipeline
from mmserve.engine.sampling_limits import validate
from mmserve.engine.vision_pipeline import VisionPipeline
from mmserve.errors import RequestError
from mmserve.held_image import ImageId
from mmserve.hub_prompt import HubTemplate
from mmserve.model.checkpoint import Checkpoint
from mmserve.model.fetch import ModelUnavailableError
from mmserve.model.loader import LoadedModel
from mmserve.model.weights import Loaded, LoadedCheckpoint
from mmserve.prompt import ChatTemplate, Message, Prompt
from mmserve.request import ImageInput, SamplingParams
from mmserve.tokenizer import Tokenizer
from mmserve.tools import ToolFormat
from mmserve.vision.decoder import build_decoder
from mmserve.vision.preprocess import fingerprint

GREEDY = SamplingParams(temperature=0.0)  # a small model babbles when it is sampled at 1


class Pipeline(Protocol):
    """From an image file to what the runner takes. `settings_id`: what an image's KV depends on
    beside its file."""

    settings_id: bytes

    def prepare(
        self,
        data: bytes,
        param: str | None = None,
        *,
        alone: bool = True,
        salt: bytes = b"",
        detail: str = "auto",
    ) -> ImageInput:
        """Thread-safe. `alone`: the only image of its prompt; `salt`: its tenant's; `detail`: how
        finely it is looked at, where the model has a choice. Raises `RequestError`s."""

    def identify(self, data: bytes, salt: bytes = b"") -> ImageId:
        """What a file is called, without looking at it. Thread-safe."""

    def pixels(self, image: ImageInput) -> Any:
        """What `ModelRunner.encode` or `look` takes of a prepared image."""

    def connect(self, is_resident: Callable[[bytes], bool], on_decode: Callable[[], None]) -> None:
        """To an engine: `is_resident(digest)` says that an image's pixels will not be needed,
        `on_decode` counts decodings. Before that nothing is resident."""

    def close(self) -> None:
        """Nothing is decoded any more."""


class Template(Protocol):
    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model is told of tools and calls them; None: it cannot be."""

    def render(
        self,
        messages: Sequence[Message],
        images: Sequence[ImageInput],
        *,
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Prompt:
        """Thread-safe. Raises `RequestError`s."""


class Border(NamedTuple):
    """Needs no engine, nor a public checkpoint's weights. `least_image_tokens`: what an image takes
    at least, known before it is looked at. `sampling`: what a request gets if it says nothing.
    `image_details`: the tokens of a whole image by the detail asked for, where that makes a
    difference; `image_crops`: how large ones are cut up."""

    tokenizer: Tokenizer
    template: Template
    pipeline: Pipeline
    least_image_tokens: int
    sampling: SamplingParams
    image_details: Mapping[str, int] = MappingProxyType({})
    image_crops: Mapping[str, int] | None = None


def build_border(model: Loaded | Checkpoint, config: EngineConfig, *, dtype: str) -> Border:
    """`dtype`: how weights are held, which KV depends on. A checkpoint's needs no weights, and is
    the same loaded or not. Raises ValueError or `ModelUnavailableError` for a model that cannot be
    spoken to."""
    if isinstance(model, LoadedModel):
        return _native(model, config, dtype)
    checkpoint = model.checkpoint if isinstance(model, LoadedCheckpoint) else model
    return _of_checkpoint(checkpoint, config, dtype)


def _tokenizer(backend: Any, eos_token_ids: Iterable[int]) -> Tokenizer:
    names = map(backend.id_to_token, sorted(eos_token_ids))
    return Tokenizer(backend, [name for name in names if name])


def _native(loaded: LoadedModel, config: EngineConfig, dtype: str) -> Border:
    spec = loaded.spec
    tokenizer = _tokenizer(loaded.tokenizer, loaded.eos_token_ids)
    template = ChatTemplate(
        tokenizer,
        system=spec.system_prompt,
        image_prefix=spec.image_prefix,
        image_suffix=spec.image_suffix,
    )
    most = config.model.image_max_tokens
    num_tokens, crops = spec.image_tokens(most), spec.image_crops(most)
    pipeline = VisionPipeline(
        build_decoder(config.images, config.decoding),
        size=spec.image_size,
        num_tokens=num_tokens,
        crops=crops,
        settings_id=fingerprint(
            ("weights", spec.weights_id),
            ("dtype", dtype.encode()),
            ("size", str(spec.image_size).encode()),
        ),
    )
    details = num_tokens if crops or len({*num_tokens.values()}) > 1 else {}
    least = min(num_tokens.values())
    cut = None if crops is None else dataclasses.asdict(crops)
    return Border(tokenizer, template, pipeline, least, GREEDY, details, cut)


def _of_checkpoint(checkpoint: Checkpoint, config: EngineConfig, dtype: str) -> Border:
    tokenizer = _tokenizer(checkpoint.tokenizer.backend_tokenizer, checkpoint.eos_token_ids)
    template = HubTemplate(
        checkpoint.processor,
        chat_template=checkpoint.chat_templates,
        takes_images=checkpoint.takes_images,
        image_token_id=checkpoint.image_token_id,
    )
    sampling = _sampling(checkpoint, tokenizer)
    if not checkpoint.takes_images:
        return Border(tokenizer, template, NoImagePipeline(), 0, sampling)
    pipeline = ProcessorPipeline(
        build_decoder(config.images, config.decoding),
        checkpoint.processor,
        template,
        checkpoint.config,
        settings_id=fingerprint(("weights", checkpoint.weights_id), ("dtype", dtype.encode())),
    )
    return Border(tokenizer, template, pipeline, 1, sampling)


def _sampling(checkpoint: Checkpoint, tokenizer: Tokenizer) -> SamplingParams:
    """Raises `ModelUnavailableError` for defaults that every request would be refused for."""
    own = dataclasses.asdict(checkpoint.sampling)
    params = SamplingParams(**{**own, "top_k": max(checkpoint.sampling.top_k, 0)})
    try:
        validate(params, tokenizer.vocab_size)
    except RequestError as error:
        raise ModelUnavailableError(
            f"{checkpoint.name}: generation_config.json is wrong: {error.message}"
        ) from error
    return params

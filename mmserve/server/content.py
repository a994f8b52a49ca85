"""The parts of a message, as both text surfaces write them.

Owns the part types of Chat Completions and Responses (each accepts the other's) and finding an
image's bytes. Knows nothing of roles, items or history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmserve.errors import RequestError, TooManyImagesError, UnsupportedImageTypeError
from mmserve.prompt import TextPart
from mmserve.server.blobs import Blob
from mmserve.server.errors import MissingParameterError, UnsupportedParameterError
from mmserve.server.fields import Fields, as_list, as_object, as_text, wrong_type
from mmserve.server.images import decode_data_url, is_data_url, is_file_id
from mmserve.server.services import Services

DETAILS = ("auto", "low", "high", "original")
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
MAX_INDEX = 2**20
OTHER_PARTS = ("input_audio", "audio", "video_url", "input_video", "video")


@dataclass(frozen=True)
class ImageRef:
    """An image a request points at: by URL, file id, or the id of an earlier item that has it (and
    which of that item's images it is), and the field that names it."""

    param: str
    url: str | None = None
    file_id: str | None = None
    detail: str = "auto"
    item_id: str | None = None
    index: int | None = None


Content = TextPart | ImageRef


def _image(url: Any, file_id: Any, detail: str, param: str) -> ImageRef:
    if url is not None:
        url = as_text(url, param)
        if is_file_id(url):
            url, file_id = None, url
    if (url is None) == (file_id is None):
        raise MissingParameterError("An image needs either a URL or a file id.", param=param)
    if file_id is not None:
        as_text(file_id, param)
    return ImageRef(param, url, file_id, detail)


def _image_url_part(part: Fields) -> ImageRef:
    value = part.required("image_url")
    if isinstance(value, str):
        return _image(value, None, "auto", part.path)
    inner = Fields(as_object(value, part.param("image_url")), part.param("image_url"))
    detail = inner.choice("detail", DETAILS, "auto")
    return _image(inner.required("url"), None, detail, part.path)


def _input_image_part(part: Fields) -> ImageRef:
    detail = part.choice("detail", DETAILS, "auto")
    url, file_id = part.get("image_url"), part.get("file_id")
    item_id, index = part.text("item_id"), part.integer("index", 0, MAX_INDEX)
    if isinstance(url, dict):  # the Chat form inside a Responses part
        url = url.get("url")
    if url is None and file_id is None and item_id is not None:
        return ImageRef(part.path, None, None, detail, item_id, index)
    return _image(url, file_id, detail, part.path)


def _file_part(part: Fields) -> ImageRef:
    file = part.object("file") if part.get("type") == "file" else part
    return _image(file.get("file_data"), file.get("file_id"), "auto", part.path)


def _part(value: Any, param: str) -> Content:
    if isinstance(value, str):
        return TextPart(as_text(value, param))
    part = Fields(as_object(value, param), param)
    kind = part.required("type")
    if kind in TEXT_PARTS:
        return TextPart(as_text(part.required(TEXT_PARTS[kind]), part.param(TEXT_PARTS[kind])))
    if kind == "image_url":
        return _image_url_part(part)
    if kind == "input_image":
        return _input_image_part(part)
    if kind in ("file", "input_file"):
        return _file_part(part)
    if kind in OTHER_PARTS:
        raise UnsupportedParameterError(
            "This model takes text and images only.", param=part.param("type")
        )
    raise RequestError(f"Unknown content type '{str(kind)[:100]}'.", param=part.param("type"))


def parse_content(value: Any, param: str) -> tuple[Content, ...]:
    """A message's content: a string, an array of parts or null. Empty texts are left out."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (TextPart(as_text(value, param)),) if value else ()
    if not isinstance(value, list):
        raise wrong_type(value, "a string or an array of parts", param)
    parts = [_part(part, f"{param}[{i}]") for i, part in enumerate(as_list(value, param))]
    return tuple(part for part in parts if not (isinstance(part, TextPart) and not part.text))


def check_count(content: Sequence[Content], services: Services) -> None:
    """Raises `TooManyImagesError`: before any is read or fetched."""
    images = [part for part in content if isinstance(part, ImageRef)]
    limit = services.info.image_limits.max_images
    if len(images) > limit:
        raise TooManyImagesError(
            f"The request has {len(images)} images; the limit is {limit}.",
            param=images[limit].param,
        )


async def bytes_at(ref: ImageRef, services: Services) -> bytes:
    """The bytes of an image that stands in the request itself, or at an address on the network."""
    assert ref.url is not None
    limits = services.info.image_limits
    if is_data_url(ref.url):
        return decode_data_url(ref.url, limits, ref.param)
    return await services.fetcher.fetch(ref.url, limits.max_bytes, ref.param)


async def uploaded(ref: ImageRef, services: Services, owner: str) -> Blob:
    """The blob of an image that was uploaded before."""
    assert ref.file_id is not None
    await services.siblings.file(ref.file_id)
    file = services.files.get(ref.file_id, owner, ref.param)
    if file.media_type is None:
        raise UnsupportedImageTypeError("This file is not an image.", param=ref.param)
    return file.blob


async def image_bytes(ref: ImageRef, services: Services, owner: str) -> bytes:
    """The encoded image, wherever it is."""
    if ref.file_id is not None:
        return await (await uploaded(ref, services, owner)).read()
    if ref.item_id is not None:
        raise UnsupportedParameterError("Nothing is kept here; send the image.", param=ref.param)
    return await bytes_at(ref, services)

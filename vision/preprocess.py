"""Encoded image bytes to pixels: identity, limits and decoding, in that order.

Owns what an acceptable image file is, its digest, and the two ways it becomes pixels: bytes of one
size [3, H, W], or an RGB image of its own size. Knows nothing of models, requests or torch. Each
fault of a file is a named `RequestError`; a file that is not whole is refused, never shown in part.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from PIL import Image

from mmserve.config import ImageLimits
from mmserve.errors import ImageTooLargeError, InvalidImageError, UnsupportedImageTypeError
from mmserve.vision import crops
from mmserve.vision.container import Header, check_whole, count_frames, read_header, sniff

Pixels = npt.NDArray[np.uint8]

# Says how bytes become pixels. It is part of every digest: change it with the decoding below.
DECODING = f"orientation, white, bicubic, draft 4; pillow {Image.__version__}".encode()
CROPPED_DECODING = DECODING + b"; crops in rows"
FULL_DECODING = f"orientation, white, full size; pillow {Image.__version__}".encode()

_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def fingerprint(*fields: tuple[str, bytes]) -> bytes:
    """SHA-256 [32 bytes] over (tag, value) fields, each length-prefixed.

    The lengths make it injective: no two different lists of fields are the same byte string.
    """
    state = hashlib.sha256()
    for tag, value in fields:
        for part in (tag.encode(), value):
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
    return state.digest()


def digest(
    data: bytes, settings_id: bytes, decoding: bytes = DECODING, *, salt: bytes = b""
) -> bytes:
    """The identity of an image [32 bytes]: its encoded bytes, how they are decoded, and by whom.

    `settings_id` stands for everything else that the image's KV depends on: size, weights, dtype.
    Build it with `fingerprint`. `salt`: of those who share it; empty: everybody.
    """
    if salt:
        settings_id = fingerprint(("settings", settings_id), ("salt", salt))
    return fingerprint(("image", data), ("decoding", decoding), ("settings", settings_id))


def check_header(data: bytes, limits: ImageLimits) -> Header:
    """The format and size of an image file, from its header alone (microseconds to milliseconds).

    Raises `InvalidImageError`, `UnsupportedImageTypeError` or `ImageTooLargeError`, with numbers.
    """
    if not data:
        raise InvalidImageError("The image is empty (0 bytes).")
    if len(data) > limits.max_bytes:
        raise ImageTooLargeError(
            f"The image is {len(data) / 2**20:.1f} MiB; the limit is "
            f"{limits.max_bytes / 2**20:g} MiB."
        )
    kind = sniff(data)
    if kind is None or kind not in limits.formats:
        what = f"looks like {kind}" if kind else "is of no known image type"
        raise UnsupportedImageTypeError(
            f"The file {what}; accepted are {', '.join(limits.formats)} (the bytes decide, not "
            "the name)."
        )
    header = read_header(data, kind)
    _check_size(header.width, header.height, limits)
    return header


def decode(data: bytes, limits: ImageLimits, size: int) -> Pixels:
    """Pixels of a whole image file as uint8 [3, size, size], RGB, upright, on white.

    Raises as `check_header` does, and `InvalidImageError` for a truncated or corrupt file.
    """
    whole: Pixels = decode_pieces(data, limits, size, 0)[0]
    return whole


def decode_pieces(data: bytes, limits: ImageLimits, size: int, count: int) -> Pixels:
    """The whole image as `decode` makes it, then `count` crops: uint8 [1 + count, 3, size, size].

    Raises as `decode` does.
    """
    # libjpeg's scaled decoding bounds a photograph's time and memory. It starts only where four
    # times the wanted size remains, so smaller images are decoded exactly; as many crops may lie
    # along one side.
    with _decoding(data, limits, draft=4 * size * max(count, 1)) as rgb:
        return to_pieces(rgb, size, count)


def to_pieces(rgb: Image.Image, size: int, count: int) -> Pixels:
    """An RGB image and `count` crops of it as uint8 [1 + count, 3, size, size]."""
    boxes = crops.boxes(rgb.width, rgb.height, count)
    return np.stack([to_pixels(rgb, size, box) for box in boxes])


def to_pixels(rgb: Image.Image, size: int, box: crops.Box | None = None) -> Pixels:
    """An RGB image, or what lies in a box, as uint8 [3, size, size]."""
    small = rgb.resize((size, size), Image.Resampling.BICUBIC, box)
    return np.ascontiguousarray(np.asarray(small).transpose(2, 0, 1))


def decode_full(data: bytes, limits: ImageLimits) -> Image.Image:
    """A whole image file as an RGB image of its own size, upright, on white.

    Raises as `decode` does. Identified with `FULL_DECODING`.
    """
    with _decoding(data, limits) as rgb:
        return rgb


@contextmanager
def _decoding(data: bytes, limits: ImageLimits, draft: int | None = None) -> Iterator[Image.Image]:
    """The decoded image while the file is open; every fault of it as a named `RequestError`."""
    header = check_header(data, limits)
    check_whole(data, header.format)
    _check_frames(data, header.format, limits)
    try:
        with Image.open(io.BytesIO(data), formats=[header.format]) as image:
            _check_size(image.width, image.height, limits)
            if draft is not None:
                image.draft(None, (draft, draft))
            image.load()
            yield _to_rgb(_upright(image))
    except Image.DecompressionBombError as error:
        raise ImageTooLargeError(f"The image is too large to decode: {error}") from error
    except (ImageTooLargeError, MemoryError):
        raise
    except Exception as error:  # Pillow's decoders raise almost anything on hostile bytes
        raise InvalidImageError(f"The {header.format} image cannot be decoded: {error}") from error


def _check_size(width: int, height: int, limits: ImageLimits) -> None:
    if width < 1 or height < 1:
        raise InvalidImageError(f"The image has no pixels ({width} x {height}).")
    if max(width, height) > limits.max_side:
        raise ImageTooLargeError(
            f"The image is {width} x {height} pixels; the longest side may be {limits.max_side}."
        )
    if width * height > limits.max_pixels:
        raise ImageTooLargeError(
            f"The image is {width * height / 1e6:.1f} megapixels ({width} x {height}); the limit "
            f"is {limits.max_pixels / 1e6:g}."
        )


def _check_frames(data: bytes, kind: str, limits: ImageLimits) -> None:
    frames = count_frames(data, kind)
    if frames > limits.max_frames:
        raise ImageTooLargeError(
            f"The animation has {frames} frames; the limit is {limits.max_frames}."
        )


def _upright(image: Image.Image) -> Image.Image:
    """The image as a viewer shows it; an orientation that cannot be read or is not 1..8 is none."""
    exif = Image.Exif()
    try:
        exif.load(image.info.get("exif", b""))
        turn = _TURNS.get(exif.get(_ORIENTATION, 1))
    except Exception:  # broken metadata is no reason to refuse the picture
        return image
    return image if turn is None else image.transpose(turn)


def _to_rgb(image: Image.Image) -> Image.Image:
    """Any mode Pillow's four decoders give, as RGB; what is transparent shows white."""
    if image.mode.startswith("I"):  # 16-bit grey; Pillow's own conversion would clip, not scale
        grey = np.asarray(image).clip(0, 65535) >> 8
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")

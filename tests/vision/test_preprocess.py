"""Decoding: every file a viewer shows gives the pixels it shows, every other file a named error."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from mmserve.config import ImageLimits
from mmserve.errors import (
    ImageTooLargeError,
    InvalidImageError,
    RequestError,
    UnsupportedImageTypeError,
)
from mmserve.vision.preprocess import Pixels, check_header, decode, decode_full, digest, fingerprint
from tests.vision.images import encode, noise, plain_png, png_chunk, smooth

LIMITS = ImageLimits()
SIZE = 224
LOSSLESS: tuple[tuple[str, dict[str, bool]], ...] = (
    ("PNG", {}),
    ("WEBP", {"lossless": True, "exact": True}),
)


def expected(image: Image.Image) -> Pixels:
    """What an RGB image becomes, by the model's own recipe."""
    resized = image.resize((SIZE, SIZE), Image.Resampling.BICUBIC)
    return np.asarray(resized, np.uint8).transpose(2, 0, 1)


def with_orientation(value: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = value
    return bytes(exif.tobytes())


# Stored this way, orientation k shows the original.
STORED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("kind, options", LOSSLESS)
@given(width=st.integers(1, 60), height=st.integers(1, 60), seed=st.integers(0, 9))
@settings(max_examples=20, deadline=None)
def test_an_opaque_picture_is_only_resized(
    kind: str, options: dict[str, bool], width: int, height: int, seed: int
) -> None:
    image = noise(width, height, seed)
    pixels = decode(encode(image, kind, **options), LIMITS, SIZE)
    assert pixels.dtype == np.uint8 and pixels.flags.c_contiguous
    assert np.array_equal(pixels, expected(image))


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("kind, options", LOSSLESS)
def test_all_eight_orientations_show_the_same_pixels(
    kind: str, options: dict[str, bool], orientation: int
) -> None:
    image, turn = noise(37, 21), STORED[orientation]
    stored = image if turn is None else image.transpose(turn)
    data = encode(stored, kind, exif=with_orientation(orientation), **options)
    assert np.array_equal(decode(data, LIMITS, SIZE), expected(image))


@pytest.mark.parametrize("orientation", STORED)
def test_a_camera_jpeg_is_turned_upright(orientation: int) -> None:
    image, turn = smooth(320, 160), STORED[orientation]
    stored = image if turn is None else image.transpose(turn)
    options = {"quality": 98, "subsampling": 0}
    data = encode(stored, "JPEG", exif=with_orientation(orientation), **options)
    difference = decode(data, LIMITS, SIZE).astype(int) - expected(image)
    assert np.abs(difference).mean() < 2


@pytest.mark.parametrize(
    "exif",
    [
        with_orientation(0),
        with_orientation(9),
        with_orientation(65535),
        b"Exif\0\0",
        b"Exif\0\0MM\0*\0\0\0",
        b"Exif\0\0MM\0*\xff\xff\xff\xff",
        with_orientation(6)[:-7],
        b"Exif\0\0no such thing",
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_bad_orientation_is_ignored(kind: str, exif: bytes) -> None:
    image = smooth(40, 24)
    plain = decode(encode(image, kind), LIMITS, SIZE)
    assert np.array_equal(decode(encode(image, kind, exif=exif), LIMITS, SIZE), plain)


@pytest.mark.parametrize(
    "kind, mode",
    [("PNG", "1"), ("PNG", "L"), ("PNG", "P"), ("GIF", "1"), ("GIF", "L"), ("GIF", "P")],
)
def test_opaque_colour_modes_become_rgb(kind: str, mode: str) -> None:
    image = smooth(50, 30).convert(mode)
    pixels = decode(encode(image, kind), LIMITS, SIZE)
    assert np.array_equal(pixels, expected(image.convert("RGB")))


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_grey_and_cmyk_jpegs_become_rgb(mode: str) -> None:
    image = smooth(64, 64).convert(mode)
    pixels = decode(encode(image, "JPEG", quality=98), LIMITS, SIZE)
    assert np.abs(pixels.astype(int) - expected(image.convert("RGB"))).mean() < 3


@pytest.mark.parametrize("alpha", [0, 51, 255])
@pytest.mark.parametrize("mode, kind", [("RGBA", "PNG"), ("LA", "PNG"), ("RGBA", "WEBP")])
def test_transparency_shows_white(mode: str, kind: str, alpha: int) -> None:
    image = Image.new("RGBA", (9, 9), (100, 100, 100, alpha)).convert(mode)
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    pixels = decode(encode(image, kind, **options), LIMITS, SIZE)
    shown = round((100 * alpha + 255 * (255 - alpha)) / 255)
    assert np.abs(pixels.astype(int) - shown).max() <= 1


def test_a_transparent_palette_entry_shows_white() -> None:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([255, 0, 0, 0, 0, 255])
    for kind in ("PNG", "GIF"):
        assert decode(encode(image, kind, transparency=1), LIMITS, SIZE).min() == 255
        assert decode(encode(image, kind, transparency=0), LIMITS, SIZE)[0].max() == 0


def test_a_colour_key_shows_white() -> None:
    data = encode(Image.new("RGB", (8, 8), (1, 2, 3)), "PNG", transparency=(1, 2, 3))
    assert decode(data, LIMITS, SIZE).min() == 255


def test_sixteen_bit_grey_keeps_its_high_byte() -> None:
    grey = np.arange(256, dtype=np.uint16).reshape(16, 16)
    pixels = decode(encode(Image.fromarray(grey << 8 | 255), "PNG"), LIMITS, SIZE)
    shown = Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    assert np.array_equal(pixels, expected(shown))


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_an_animation_is_its_first_frame(kind: str) -> None:
    first, second = (Image.new("RGB", (20, 20), colour) for colour in ("red", "blue"))
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encode(first, kind, save_all=True, append_images=[second], duration=50, **options)
    assert decode(data, LIMITS, SIZE)[:, 100, 100].tolist() == [255, 0, 0]


@pytest.mark.parametrize(
    "width, height",
    [(1, 1), (1, 224), (224, 1), (2, 2), (27, 257), (1, 10_000), (10_000, 1), (1093, 5)],
)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_tiny_and_thin_pictures_are_scaled(kind: str, width: int, height: int) -> None:
    data = encode(Image.new("RGB", (width, height), (0, 0, 255)), kind)
    pixels = decode(data, LIMITS, SIZE)
    assert pixels.shape == (3, SIZE, SIZE)
    assert np.abs(pixels[:, 7, 9].astype(int) - [0, 0, 255]).max() <= 4


@pytest.mark.parametrize(
    "options",
    [{"progressive": True}, {"restart_marker_blocks": 3}, {"optimize": True}, {"quality": 5}],
    ids=str,
)
def test_every_kind_of_jpeg_is_whole(options: dict[str, int]) -> None:
    image = noise(200, 120)
    data = encode(image, "JPEG", **options)
    shown = Image.open(io.BytesIO(data)).convert("RGB")
    assert np.array_equal(decode(data, LIMITS, SIZE), expected(shown))
    assert np.array_equal(decode(data + b"a film after the photo", LIMITS, SIZE), expected(shown))


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("kind, options", LOSSLESS)
def test_a_picture_of_its_own_size_is_exactly_what_was_stored(
    kind: str, options: dict[str, bool], orientation: int
) -> None:
    image, turn = noise(37, 21), STORED[orientation]
    stored = image if turn is None else image.transpose(turn)
    data = encode(stored, kind, exif=with_orientation(orientation), **options)
    full = decode_full(data, LIMITS)
    assert (full.mode, full.size) == ("RGB", image.size)
    assert np.array_equal(np.asarray(full), np.asarray(image))


def test_a_photograph_of_its_own_size_is_never_decoded_at_scale() -> None:
    data = encode(smooth(3000, 2000), "JPEG")
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(np.asarray(decode_full(data, LIMITS)), np.asarray(image))


def test_a_picture_of_its_own_size_passes_the_same_checks() -> None:
    whole = encode(noise(40, 40), "PNG")
    with pytest.raises(InvalidImageError):
        decode_full(whole[: len(whole) // 2], LIMITS)
    with pytest.raises(UnsupportedImageTypeError):
        decode_full(b"no picture at all", LIMITS)
    with pytest.raises(ImageTooLargeError, match="longest side may be 39"):
        decode_full(whole, ImageLimits(max_side=39))


def test_a_photograph_decoded_at_scale_is_nearly_the_exact_one() -> None:
    image = smooth(3000, 2000)
    pixels = decode(encode(image, "JPEG", quality=95), LIMITS, SIZE)
    assert np.abs(pixels.astype(int) - expected(image)).mean() < 1.5


@pytest.mark.parametrize("cut", [1, 2, 6, 12, 128, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_truncated_file_is_refused(kind: str, cut: float) -> None:
    data = encode(noise(64, 64), kind)
    removed = int(cut if cut >= 1 else cut * len(data))
    if kind == "GIF" and removed == 1:
        return  # only the trailer is gone: the first picture is whole
    with pytest.raises(InvalidImageError):
        decode(data[:-removed], LIMITS, SIZE)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_header_with_random_bytes_behind_it_is_refused(kind: str) -> None:
    data = encode(noise(128, 128), kind)
    start = {"PNG": 60, "JPEG": data.find(b"\xff\xda") + 14, "WEBP": 30, "GIF": 900}[kind]
    garbage = np.random.default_rng(1).bytes(len(data) - start - 2) + data[-2:]
    with pytest.raises(InvalidImageError):
        decode(data[:start] + garbage, LIMITS, SIZE)


@given(position=st.integers(0, 10_000), flip=st.integers(1, 255))
@settings(max_examples=150, deadline=None)
def test_a_flipped_byte_in_a_png_never_changes_the_picture(position: int, flip: int) -> None:
    image = noise(16, 16)
    data = bytearray(encode(image, "PNG", exif=with_orientation(1)))
    data[position % len(data)] ^= flip
    with pytest.raises(RequestError):
        decode(bytes(data), LIMITS, SIZE)


@given(
    start=st.sampled_from([encode(noise(9, 9), k) for k in ("PNG", "JPEG", "WEBP", "GIF")]),
    keep=st.integers(0, 400),
    rest=st.binary(max_size=300),
)
@settings(max_examples=300, deadline=None)
def test_any_bytes_give_pixels_or_a_named_error(start: bytes, keep: int, rest: bytes) -> None:
    try:
        pixels = decode(start[:keep] + rest, LIMITS, SIZE)
    except RequestError as error:
        assert error.status == 400 and error.message
    else:
        assert pixels.shape == (3, SIZE, SIZE)


@pytest.mark.parametrize(
    "data, error, words",
    [
        (b"", InvalidImageError, "0 bytes"),
        (b"<!DOCTYPE html><html>", UnsupportedImageTypeError, "HTML"),
        (b'<svg xmlns="http://www.w3.org/2000/svg"/>', UnsupportedImageTypeError, "SVG"),
        (b"%PDF-1.7", UnsupportedImageTypeError, "PDF"),
        (b"\0\0\0\x18ftypheic", UnsupportedImageTypeError, "HEIC"),
        (b"plain text", UnsupportedImageTypeError, "PNG, JPEG, WEBP, GIF"),
        (b"\x89PNG\r\n\x1a\n", InvalidImageError, "PNG"),
        (b"\xff\xd8\xff", InvalidImageError, "JPEG"),
    ],
)
def test_what_is_no_picture_is_named(data: bytes, error: type[RequestError], words: str) -> None:
    with pytest.raises(error, match=words):
        decode(data, LIMITS, SIZE)


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "ICO"])
def test_other_image_formats_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedImageTypeError, match=kind):
        check_header(encode(noise(32, 32), kind), LIMITS)


def test_only_the_listed_formats_are_accepted() -> None:
    only_png = ImageLimits(formats=("PNG",))
    assert check_header(encode(noise(4, 5), "PNG"), only_png) == ("PNG", 4, 5)
    with pytest.raises(UnsupportedImageTypeError, match="JPEG"):
        check_header(encode(noise(4, 4), "JPEG"), only_png)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_the_header_states_the_size(kind: str) -> None:
    assert check_header(encode(noise(301, 17), kind), LIMITS) == (kind, 301, 17)


def test_lossless_and_animated_webp_state_their_size() -> None:
    frames = {"save_all": True, "append_images": [noise(301, 17, 1)]}
    for options in ({"lossless": True}, frames):
        assert check_header(encode(noise(301, 17), "WEBP", **options), LIMITS)[1:] == (301, 17)


def test_a_decompression_bomb_is_refused_from_its_header() -> None:
    data = plain_png(14_000, 14_000)
    header = data[: data.index(b"IDAT")]
    for there in (data, header):  # what is refused without the rest was not read for it
        with pytest.raises(ImageTooLargeError, match=r"196\.0 megapixels .* 40"):
            decode(there, LIMITS, SIZE)


def test_a_bomb_below_a_raised_limit_is_stopped_by_the_decoder() -> None:
    with pytest.raises(ImageTooLargeError):
        decode(plain_png(14_000, 14_000), ImageLimits(max_pixels=10**9), SIZE)


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP"])
def test_an_animation_of_more_frames_than_the_limit_is_refused(kind: str) -> None:
    others = [noise(8, 8, seed) for seed in (1, 2)]
    data = encode(noise(8, 8), kind, save_all=True, append_images=others)
    assert decode(data, ImageLimits(max_frames=3), SIZE).shape
    with pytest.raises(ImageTooLargeError, match="3 frames; the limit is 2"):
        decode(data, ImageLimits(max_frames=2), SIZE)


def test_a_gif_that_ends_behind_its_first_picture_is_shown() -> None:
    data = encode(noise(8, 8), "GIF", save_all=True, append_images=[noise(8, 8, 1)])
    shown = decode(data, LIMITS, SIZE)
    assert np.array_equal(decode(data[:-20], LIMITS, SIZE), shown)


MANY = 2_000_000
JPEG_HEAD = b"\xff\xd8\xff\xc0\0\x0b\x08\0\x10\0\x10\1\1\x11\0"
GIF_HEAD = b"GIF89a\x10\0\x10\0\0\0\0"


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xd8" + b"\xff\xfe\0\2" * MANY,
        b"\xff\xd8" + b"\xff" * MANY,
        JPEG_HEAD + b"\xff\xda\0\x03\0a" * 101 + b"\xff\xd9",
        GIF_HEAD + b"!\xfe\0" * MANY,
        GIF_HEAD + b",\0\0\0\0\x10\0\x10\0\0\2" + b"\1a" * MANY,
        encode(noise(8, 8), "PNG")[:33] + png_chunk(b"juNk", b"") * MANY,
        b" " * MANY,
    ],
    ids=["segments", "fill", "scans", "extensions", "blocks", "chunks", "spaces"],
)
def test_a_file_of_very_many_parts_is_refused(data: bytes) -> None:
    """What could keep a decoder busy for long; B33's kind."""
    with pytest.raises(RequestError):
        decode(data, LIMITS, SIZE)


def test_sizes_beyond_the_limits_are_refused_with_the_numbers() -> None:
    data = encode(noise(30, 20), "PNG")
    assert decode(data, ImageLimits(max_pixels=600, max_side=30), SIZE).shape
    with pytest.raises(ImageTooLargeError, match="30 x 20"):
        decode(data, ImageLimits(max_pixels=599), SIZE)
    with pytest.raises(ImageTooLargeError, match="30 x 20.* 29"):
        decode(data, ImageLimits(max_side=29), SIZE)
    with pytest.raises(ImageTooLargeError, match="MiB"):
        decode(data, ImageLimits(max_bytes=len(data) - 1), SIZE)


def test_decoding_leaves_pillows_global_settings_alone() -> None:
    assert Image.MAX_IMAGE_PIXELS == 1024 * 1024 * 1024 // 4 // 3
    assert not ImageFile.LOAD_TRUNCATED_IMAGES


def test_an_identity_needs_equal_bytes_and_equal_settings() -> None:
    settings_a, settings_b = fingerprint(("size", b"224")), fingerprint(("size", b"448"))
    assert digest(b"x", settings_a) == digest(b"x", settings_a)
    assert len({digest(b"x", settings_a), digest(b"y", settings_a), digest(b"x", settings_b)}) == 3


@given(st.lists(st.tuples(st.text(), st.binary()), max_size=4), st.data())
def test_a_fingerprint_tells_where_fields_end(
    fields: list[tuple[str, bytes]], data: st.DataObject
) -> None:
    other = data.draw(st.lists(st.tuples(st.text(), st.binary()), max_size=4))
    assert (fingerprint(*fields) == fingerprint(*other)) == (fields == other)
    assert fingerprint(("a", b"bc")) != fingerprint(("ab", b"c"))

"""Decoding in other processes: the same pixels and refusals, and a fault costs one image."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

sys.path.append(str(Path(__file__).parents[2]))  # the processes have the same

from mmserve.config import MIB, DecodingConfig, ImageLimits
from mmserve.errors import ImageTooLargeError, InvalidImageError, RequestError
from mmserve.vision import decode_process
from mmserve.vision.decode_pool import DecodePool
from mmserve.vision.decoder import DecodeHere, build_decoder
from tests.vision.images import encode, noise, smooth
from tests.vision.test_preprocess import with_orientation

SIZE = 32
LONG_S = 120.0  # only what hangs takes so long
LIMITS = ImageLimits()
HERE = DecodeHere(LIMITS)
GOOD = encode(noise(40, 30), "PNG")


@pytest.fixture(scope="module")
def pool() -> Iterator[DecodePool]:
    made = DecodePool(LIMITS, 1, LONG_S)
    yield made
    made.close()


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., DecodePool]]:
    """Pools whose processes do what a file's last bytes say."""
    monkeypatch.setattr(decode_process, "__name__", "tests.vision.faulty_process")
    pools = []

    def build(seconds: float = LONG_S, limits: ImageLimits = LIMITS) -> DecodePool:
        pools.append(DecodePool(limits, 1, seconds))
        return pools[-1]

    yield build
    for made in pools:
        made.close()


def process_of(pool: DecodePool) -> int:
    """Its id; the process is ready."""
    (worker,) = pool._workers
    worker.await_ready()
    assert worker._child is not None
    return worker._child.pid


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("turn", [1, 6])
def test_another_process_gives_the_same_pixels(pool: DecodePool, kind: str, turn: int) -> None:
    options = {} if kind == "GIF" else {"exif": with_orientation(turn)}
    data = encode(smooth(300, 200), kind, **options)
    assert np.array_equal(pool.decode(data, SIZE), HERE.decode(data, SIZE))
    assert np.array_equal(pool.decode(data, SIZE, 6), HERE.decode(data, SIZE, 6))
    full = pool.decode_full(data)
    assert full.mode == "RGB" and full.size == HERE.decode_full(data).size
    assert np.array_equal(np.asarray(full), np.asarray(HERE.decode_full(data)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<html>",
        GOOD[:-6],
        encode(noise(9, 9), "JPEG")[:-40],
        encode(noise(9, 9), "BMP"),
        encode(Image.new("1", (17_000, 1)), "PNG"),
    ],
    ids=["empty", "html", "cut png", "cut jpeg", "bmp", "long"],
)
def test_another_process_gives_the_same_refusals(pool: DecodePool, data: bytes) -> None:
    said = []
    for decoder in (HERE, pool):
        with pytest.raises(RequestError) as caught:
            decoder.decode(data, SIZE)
        said.append((type(caught.value), caught.value.message))
    assert said[0] == said[1]


@pytest.mark.parametrize("fault", ["crash", "leave", "short", "huge", "fault", "words"])
def test_a_codec_that_fails_costs_its_image_and_nothing_else(
    faulty: Callable[..., DecodePool], fault: str
) -> None:
    pool = faulty()
    before = process_of(pool)
    with pytest.raises(InvalidImageError, match="decoder failed"):
        pool.decode(GOOD + fault.encode(), SIZE)
    assert np.array_equal(pool.decode(GOOD, SIZE), HERE.decode(GOOD, SIZE))
    assert process_of(pool) != before


def test_a_codec_that_hangs_is_ended(faulty: Callable[..., DecodePool]) -> None:
    pool = faulty(seconds=0.5)
    before = process_of(pool)
    with pytest.raises(InvalidImageError, match="longer than 0.5 s"):
        pool.decode(GOOD + b"hang", SIZE)
    assert process_of(pool) != before
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="no such limit is kept elsewhere")
def test_memory_beyond_the_limit_is_refused_and_the_process_lives(
    faulty: Callable[..., DecodePool],
) -> None:
    pool = faulty(limits=ImageLimits(max_bytes=MIB, max_pixels=10_000))
    before = process_of(pool)
    with pytest.raises(ImageTooLargeError, match="more memory"):
        pool.decode(GOOD + b"hog", SIZE)
    assert pool.decode(GOOD, SIZE).shape == (1, 3, SIZE, SIZE)
    assert process_of(pool) == before


@pytest.mark.parametrize("mode, kind", [("RGBA", "PNG"), ("RGBA", "WEBP"), ("CMYK", "JPEG")])
def test_the_largest_image_allowed_has_the_memory_it_needs(mode: str, kind: str) -> None:
    """Those of most bytes a pixel, turned; the WebP is an animation."""
    side = 3000
    image = Image.new(mode, (side, side), 7)
    options = {"save_all": True, "append_images": [image.rotate(0)]} if kind == "WEBP" else {}
    data = encode(image, kind, exif=with_orientation(6), **options)
    limits = ImageLimits(max_bytes=MIB, max_pixels=side * side)
    pool = DecodePool(limits, 1, LONG_S)
    try:
        assert pool.decode(data, SIZE).shape == (1, 3, SIZE, SIZE)
        assert pool.decode_full(data).size == (side, side)
    finally:
        pool.close()


def test_a_process_that_ended_while_idle_costs_no_image(pool: DecodePool) -> None:
    before = process_of(pool)
    os.kill(before, signal.SIGKILL)
    os.waitid(os.P_PID, before, os.WEXITED | os.WNOWAIT)
    assert pool.decode(GOOD, SIZE).shape == (1, 3, SIZE, SIZE)
    assert process_of(pool) != before


def test_many_images_at_once_each_get_their_own_pixels() -> None:
    pool = DecodePool(LIMITS, 2, LONG_S)
    files = [encode(noise(30, 20, seed), "PNG") for seed in range(40)]
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda data: pool.decode(data, SIZE), files))
    pool.close()
    for data, pixels in zip(files, made, strict=True):
        assert np.array_equal(pixels, HERE.decode(data, SIZE))


def test_a_closed_pool_has_no_process_and_may_be_used_again() -> None:
    pool = DecodePool(LIMITS, 1, LONG_S)
    before = process_of(pool)
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    assert pool.decode(GOOD, SIZE).shape == (1, 3, SIZE, SIZE)
    pool.close()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_process_has_neither_secrets_nor_pytorch_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMSERVE_API_KEY", "sk-secret")
    pool = DecodePool(LIMITS, 1, LONG_S)
    process = Path(f"/proc/{process_of(pool)}")
    assert b"secret" not in (process / "environ").read_bytes()
    mapped = (process / "maps").read_text()
    assert "PIL" in mapped and "torch" not in mapped
    assert "Max core file size" in (limits := (process / "limits").read_text())
    for line in limits.splitlines():
        if line.startswith(("Max core file size", "Max file size")):
            assert line.split("size")[1].split()[:2] == ["0", "0"]
    pool.close()


def test_images_are_decoded_here_unless_processes_are_asked_for() -> None:
    assert isinstance(build_decoder(LIMITS, DecodingConfig()), DecodeHere)
    made = build_decoder(LIMITS, DecodingConfig(processes=1))
    assert isinstance(made, DecodePool)
    made.close()

"""From the bytes of an image to pixels, doing nothing that has been done before.

Owns identity and decoding of images for the engine: the digest of the encoded bytes comes first,
and an image whose KV is in the pool is neither decoded nor kept as pixels. Knows nothing of
sessions, queues or KV. Thread-safe: requests are prepared beside the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mmserve.errors import RequestError
from mmserve.held_image import ImageId
from mmserve.request import ImageInput
from mmserve.vision import preprocess
from mmserve.vision.decoder import Decoder


class VisionPipeline:
    """`is_resident(digest)` says whether the vision pool holds an image's KV already."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        size: int,
        num_tokens: Mapping[str, int],
        settings_id: bytes,
    ) -> None:
        """`num_tokens`: of an image, by the detail asked for."""
        self.limits = decoder.limits
        self.decoder = decoder
        self.size = size
        self.num_tokens = num_tokens
        self.settings_id = settings_id
        self.connect(lambda _: False, lambda: None)

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
    ) -> ImageInput:
        """Check and identify one image; decode it unless its KV is known.

        `alone`: it is the only one of its prompt, which makes no difference here. Raises
        InvalidImageError, UnsupportedImageTypeError or ImageTooLargeError with `param`.
        """
        count = self.num_tokens[detail]
        try:
            preprocess.check_header(data, self.limits)
            digest = self._digest(data, count, salt)
            pixels = None if self.is_resident(digest) else self._decode(data)
        except RequestError as error:
            error.param = param
            raise
        return ImageInput(digest, data, count, pixels)

    def close(self) -> None:
        self.decoder.close()

    def identify(self, data: bytes, salt: bytes = b"") -> ImageId:
        """What an image file is called, without looking at it."""
        counts = sorted({*self.num_tokens.values()}, reverse=True)
        return ImageId(tuple(self._digest(data, count, salt) for count in counts), counts[0])

    def pixels(self, image: ImageInput) -> Tensor:
        """uint8 [1, 3, H, W]; decodes again if the KV was evicted after `prepare`."""
        pixels = self._decode(image.data) if image.pixels is None else image.pixels
        return torch.from_numpy(pixels)[None]

    def _digest(self, data: bytes, count: int, salt: bytes) -> bytes:
        """Fewer tokens see fewer: their KV is not the beginning of that of more."""
        tokens = ("tokens", str(count).encode())
        settings = preprocess.fingerprint(("settings", self.settings_id), tokens)
        return preprocess.digest(data, settings, salt=salt)

    def _decode(self, data: bytes) -> preprocess.Pixels:
        self.on_decode()
        return self.decoder.decode(data, self.size)

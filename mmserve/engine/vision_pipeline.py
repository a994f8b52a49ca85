"""From the bytes of an image to pixels, doing nothing that has been done before.

Owns identity and decoding of images for the engine: the digest of the encoded bytes comes first,
and an image whose KV is in the pool is neither decoded nor kept as pixels. Knows nothing of
sessions, queues or KV. Thread-safe: requests are prepared beside the engine thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mmserve.errors import RequestError
from mmserve.held_image import ImageId
from mmserve.request import ImageInput
from mmserve.vision import preprocess
from mmserve.vision.container import Header
from mmserve.vision.crops import Crops
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
        crops: Crops | None = None,
    ) -> None:
        """`num_tokens`: of a whole image, by the detail asked for; `crops`: how large ones are cut
        up, each piece into as many as there are at most."""
        self.limits = decoder.limits
        self.decoder = decoder
        self.size = size
        self.num_tokens = num_tokens
        self.settings_id = settings_id
        self.crops = crops
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
        try:
            header = preprocess.check_header(data, self.limits)
            count = self._count(header, detail)
            digest = self._digest(data, count, salt)
            pixels = None if self.is_resident(digest) else self._decode(data, count)
        except RequestError as error:
            error.param = param
            raise
        return ImageInput(digest, data, count, pixels)

    def close(self) -> None:
        self.decoder.close()

    def identify(self, data: bytes, salt: bytes = b"") -> ImageId:
        """What an image file is called, by its header alone."""
        header = None
        with contextlib.suppress(RequestError):  # limits may be lower than when it came
            header = preprocess.check_header(data, self.limits) if self.crops else None
        counts = sorted({self._count(header, detail) for detail in self.num_tokens}, reverse=True)
        return ImageId(tuple(self._digest(data, count, salt) for count in counts), tuple(counts))

    def pixels(self, image: ImageInput) -> Tensor:
        """uint8 [P, 3, H, W], its pieces; decodes again if the KV was evicted after `prepare`."""
        known = image.pixels
        pixels = self._decode(image.data, image.num_tokens) if known is None else known
        return torch.from_numpy(pixels)

    @property
    def _most(self) -> int:
        """Tokens of a piece."""
        return max(self.num_tokens.values())

    def _count(self, header: Header | None, detail: str) -> int:
        if self.crops is None or header is None:
            return self.num_tokens[detail]
        crops = self.crops.count(header.width, header.height, self.size, detail)
        return (1 + crops) * self._most if crops else self.num_tokens[detail]

    def _digest(self, data: bytes, count: int, salt: bytes) -> bytes:
        """Fewer tokens see fewer: their KV is not the beginning of that of more."""
        tokens = ("tokens", str(count).encode())
        settings = preprocess.fingerprint(("settings", self.settings_id), tokens)
        whole = count <= self._most
        decoding = preprocess.DECODING if whole else preprocess.CROPPED_DECODING
        return preprocess.digest(data, settings, decoding, salt=salt)

    def _decode(self, data: bytes, count: int) -> preprocess.Pixels:
        """`count`: of tokens, which say in how many pieces."""
        self.on_decode()
        return self.decoder.decode(data, self.size, max(count // self._most - 1, 0))

"""Where a GPU looks at images: beside the decoder, on a stream of their own.

Owns that stream, the captured tower and whose memory is whose. Knows nothing of sequences or KV.

A tower is arithmetic and a decode step reads weights, so neither takes much from the other. Nor do
bits depend on what runs beside: each image is computed alone, in its one shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from mmserve.engine.feature_cache import Done
from mmserve.engine.graphs import Graphs
from mmserve.engine.transfer import send
from mmserve.model.adapter import Features
from mmserve.model.cuda_step import BACKENDS


class VisionStream:
    """A second stream, in order; without a GPU the caller's own time."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = None
        if device.type == "cuda":
            stream: Any = torch.cuda.Stream
            self._stream = stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))  # it writes the weights

    def start(self, see: Callable[[], Features]) -> tuple[Features, Done]:
        """What `see` launches, and when it is done: then the caller's stream may read it."""
        if self._stream is None:
            return see(), Done()
        reader = torch.cuda.current_stream(self._stream.device)
        with torch.cuda.stream(self._stream), sdpa_kernel(BACKENDS, set_priority=True):
            features = see()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        # Memory that is given back returns to this stream, though the reader may still be behind.
        for tensor in features.tensors:
            tensor.record_stream(reader)
        return features, Done(event)

    def finish(self, see: Callable[[], Features]) -> Features:
        """What `see` makes on the host, on any thread; the caller waits."""
        if self._stream is None:
            return see()
        device, stream = torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream)
        with device, stream, sdpa_kernel(BACKENDS, set_priority=True):
            return see()


class CapturedTower:
    """A vision model whose images are all of one size, launched as one graph.

    The graph has memory of its own, because it runs beside the decoder's. Public checkpoints'
    towers take images of any size, and read sizes back from the device, so they are launched
    kernel by kernel and the host may wait for them.
    """

    def __init__(self, model: Any, device: torch.device, dtype: torch.dtype) -> None:
        """`dtype`: of the tokens."""
        self._model, self._device, self._dtype = model, device, dtype
        self._graphs = Graphs(device, "the vision tower", must=False)
        self._pixels: Tensor | None = None

    def __call__(self, pixels: Tensor) -> Tensor:
        """uint8 [P, 3, H, W] on the host: an image's pieces -> [P * n, hidden], in the order of the
        current stream."""
        pieces = [self._piece(piece[None]) for piece in pixels]
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def _piece(self, pixels: Tensor) -> Tensor:
        sent = send(pixels, self._device)
        if not self._graphs.enabled:
            return self._see(sent)
        if self._pixels is None:
            self._pixels = torch.empty_like(sent)
        fixed = self._pixels.copy_(sent)
        # The next image's tokens come to the same place, maybe before these have been read.
        return self._graphs.run("tower", lambda: self._see(fixed)).clone()

    def _see(self, pixels: Tensor) -> Tensor:
        tokens: Tensor = self._model.encode(pixels)[0]
        return tokens.to(self._dtype)

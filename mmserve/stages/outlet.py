"""An engine that sends KV away while it computes it.

Owns which objects of which job leave when: images as soon as they are written; text by layers, each
as soon as a step has come past it, while the later ones are still computed. Knows nothing of
sockets.

A step that is replayed as a whole (captured) shows no layers, nor does one that is cut into slices;
all of it leaves behind it then. In any case an object is read in the order of the device's stream,
before whatever is launched later writes to its pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmserve.cache.radix_node import HOLE
from mmserve.engine.engine import Engine
from mmserve.engine.kv_objects import Event, KVObjects
from mmserve.engine.model_runner import Logits
from mmserve.engine.transfer import upload
from mmserve.handover.wire import Piece
from mmserve.model import attention
from mmserve.scheduler.batch import Batch
from mmserve.sequence import Sequence as Seq
from mmserve.tiers.host_memory import host_memory
from mmserve.tiers.kv_object import Now, Owner, Parts, Waits
from mmserve.tiers.names import RUN_PAGES, image_name, run_names

Send = Callable[[Piece, Tensor, Waits], None]  # what, uint8 on the host, when it is there


@dataclass
class Errand:
    """A job as the engine sees it. `send`: takes pieces away; `runs`, `images`: what is wanted."""

    job: int
    runs: frozenset[bytes]
    images: set[bytes]
    send: Send
    names: list[bytes] | None = None  # of all its whole runs, once it is laid out
    num_gone: int = 0  # runs that have left, or are not wanted


@dataclass
class _Leaving:
    """Runs that are complete with this step, in all text groups' pages."""

    errand: Errand
    names: tuple[bytes, ...]
    pages: dict[int, Tensor]  # by group
    gone: set[int] = field(default_factory=set)  # layers


class StageEngine(Engine):
    """Of a stage worker. `outlet`: None until it has any job."""

    outlet: Outlet | None = None

    def _compute(self, batch: Batch, previous: Any) -> Logits | None:
        if self.outlet is None:
            return super()._compute(batch, previous)
        self.outlet.begin(batch)
        try:
            return super()._compute(batch, previous)
        finally:
            self.outlet.end()


class Outlet:
    def __init__(self, engine: Engine) -> None:
        self.errands: dict[str, Errand] = {}  # by request
        runner, self._holdings = engine.runner, engine.scheduler.holdings
        self._owner = Owner(engine.kv.identity, engine.made_of[0].cache.kv_compatible_with)
        self.seed = self._owner.seed
        self._text, self._vision, self._device = runner.text, runner.vision, runner.device
        self._objects = KVObjects(self._owner, runner.text, runner.vision)
        self._places = attention.places(runner.groups)
        self._run_tokens = RUN_PAGES * self._holdings.page_size
        every = tuple(range(RUN_PAGES))
        pages = tuple((g, every) for g in self._holdings.text_groups)
        self._parts = Parts("text", self._run_tokens, pages)
        self._num_bytes = self._owner.num_bytes(self._parts)
        self._open: list[_Leaving] = []
        self._stream: Any = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        if not (runner.overlaps and runner.deterministic):  # else steps are cut into slices
            for layer, module in enumerate(runner.adapter.decoder.layers):
                module.register_forward_hook(partial(self._passed, layer))

    # -- images ---------------------------------------------------------------------------------

    def send_images(self) -> None:
        """Those that are written; between two steps, or before a step's text is computed."""
        for errand in self.errands.values():
            for key in [key for key in errand.images if self._is_ready(key)]:
                errand.images.discard(key)
                self._send_image(errand, key)

    def _is_ready(self, key: bytes) -> bool:
        groups = self._holdings.image_groups
        return all(self._holdings.vision[g].is_ready(key) for g in groups)

    def _send_image(self, errand: Errand, key: bytes) -> None:
        found = {g: self._holdings.vision[g].lookup(key) for g in self._holdings.image_groups}
        entries = {g: entry for g, entry in found.items() if entry is not None}
        tokens = next(iter(entries.values())).num_tokens
        pages = {g: entry.pages for g, entry in entries.items()}
        name = image_name(self.seed, key)
        item = self._objects.read(name, "image", tokens, pages, durable=False)
        piece = Piece(errand.job, (name,), item.parts, 0, item.num_bytes)
        errand.send(piece, item.memory, item.done)

    # -- text -----------------------------------------------------------------------------------

    def begin(self, batch: Batch) -> None:
        """A step's text is about to be computed."""
        self.send_images()
        for chunk in batch.chunks:
            errand = self.errands.get(chunk.seq.id)
            if errand is not None:
                self._complete(errand, chunk.seq, chunk.start + chunk.count)

    def _complete(self, errand: Errand, seq: Seq, end: int) -> None:
        """Runs that are whole once `end` tokens are computed."""
        if errand.names is None:
            errand.names = run_names(self.seed, seq.keys, self._run_tokens)
        first, last = errand.num_gone, min(end // self._run_tokens, len(errand.names))
        wanted = [n for n in range(first, last) if errand.names[n] in errand.runs]
        errand.num_gone = max(first, last)
        pages: dict[int, Tensor] = {}
        for g in self._holdings.text_groups:
            places = (n * RUN_PAGES + i for n in wanted for i in range(RUN_PAGES))
            own = [seq.tables[g][place] for place in places]
            if HOLE in own:
                return  # a window has passed by: who waits for it computes it
            pages[g] = upload(own, torch.long, self._device)
        if wanted:
            names = tuple(errand.names[n] for n in wanted)
            self._open.append(_Leaving(errand, names, pages))

    def _passed(self, layer: int, *_: Any) -> None:
        """A step has come past a layer."""
        if not self._open or (self._stream and torch.cuda.is_current_stream_capturing()):
            return
        for leaving in self._open:
            self._send_layer(leaving, layer)

    def end(self) -> None:
        """All of a step is launched."""
        for leaving in self._open:
            for layer in self._places:
                self._send_layer(leaving, layer)
        self._open.clear()

    @torch.inference_mode()
    def _send_layer(self, leaving: _Leaving, layer: int) -> None:
        group, number = self._places[layer]
        if group not in leaving.pages or layer in leaving.gone:
            return
        leaving.gone.add(layer)
        count, pool = len(leaving.names), self._text[group].tensor
        found = pool[number].index_select(2, leaving.pages[group])  # [2, heads, pages, ...]
        by_run = (
            found.view(*found.shape[:2], count, RUN_PAGES, *found.shape[3:])
            .movedim(2, 0)
            .contiguous()
        )
        payload, done = self._to_host(by_run.view(torch.uint8).flatten())
        size = payload.numel() // count
        start = self._start(group) + number * size
        piece = Piece(leaving.errand.job, leaving.names, self._parts, start, size)
        leaving.errand.send(piece, payload, done)

    def _start(self, group: int) -> int:
        """Where in an object a group's layers begin."""
        before = [(g, pages) for g, pages in self._parts.pages if g < group]
        return sum(self._owner.bytes_of(g, "text", len(pages)) for g, pages in before)

    def _to_host(self, payload: Tensor) -> tuple[Tensor, Waits]:
        """A copy beside the steps that are launched next."""
        if self._stream is None:
            return payload, Now()
        memory = host_memory(payload.numel(), pinned=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            memory.copy_(payload, non_blocking=True)
            done = Event()
        payload.record_stream(self._stream)
        return memory, done

"""Pages of an engine's pools as objects of the tiers, and back.

Owns the copies between device and host, in the order of the engine's stream. Knows nothing of which
pages, when, or where objects lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mmserve.cache.kv_pool import TextKVPool, VisionKVPool
from mmserve.cache.radix_node import HOLE
from mmserve.engine.page_copy import gather, scatter
from mmserve.engine.transfer import upload
from mmserve.kvfile.header import Kind
from mmserve.tiers.host_memory import host_memory
from mmserve.tiers.kv_object import KVObject, Now, Owner, Parts, Waits


class Event:
    """A place in the order of the current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        self._event.wait()

    def synchronize(self) -> None:
        self._event.synchronize()


class KVObjects:
    """`text`, `vision`: the pools by layer group."""

    def __init__(
        self, owner: Owner, text: Sequence[TextKVPool], vision: Sequence[VisionKVPool]
    ) -> None:
        self.owner = owner
        self._pools: dict[Kind, Sequence[TextKVPool] | Sequence[VisionKVPool]]
        self._pools = {"text": text, "image": vision}
        self._device = text[0].shape.device

    @torch.inference_mode()
    def read(
        self,
        name: bytes,
        kind: Kind,
        num_tokens: int,
        pages: Mapping[int, Sequence[int]],
        *,
        durable: bool,
    ) -> KVObject:
        """A copy of these pages, by layer group; HOLEs are left out.

        Made when the stream comes to it, so before whatever is launched later writes to the pages.
        """
        places = {g: tuple(i for i, p in enumerate(own) if p != HOLE) for g, own in pages.items()}
        parts = Parts(kind, num_tokens, tuple((g, of) for g, of in places.items() if of))
        num_bytes = self.owner.num_bytes(parts)
        on_device = self._device.type != "cpu"
        memory = host_memory(num_bytes, pinned=on_device)
        made = memory
        if on_device:
            made = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        for g, of, view in self.owner.views(parts, made):
            gather(self._pools[kind][g], [pages[g][i] for i in of], out=view)
        done: Waits = Now()
        if on_device:
            memory.copy_(made, non_blocking=True)
            done = Event()
        return KVObject(name, parts, memory, done, durable)

    @torch.inference_mode()
    def write(self, item: KVObject, pages: Mapping[int, Mapping[int, int]]) -> None:
        """Write an object's pages, by layer group and place, to these pages of the pools."""
        item.done.wait()
        memory = item.memory.to(self._device, non_blocking=True)
        for g, places, view in self.owner.views(item.parts, memory):
            wanted = pages.get(g, {})
            chosen = [i for i, place in enumerate(places) if place in wanted]
            if not chosen:
                continue
            if len(chosen) < len(places):
                view = view.index_select(3, upload(chosen, torch.long, self._device))
            pool = self._pools[item.parts.kind][g]
            scatter(pool, [wanted[places[i]] for i in chosen], view)

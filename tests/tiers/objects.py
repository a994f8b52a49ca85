"""Small objects of a made-up model, and who listens to a stack of tiers."""

from __future__ import annotations

from collections import Counter

import torch

from mmserve.tiers.kv_object import KVObject, Owner, Parts
from tests.kvfile.files import identity

OWNER = Owner(identity())
PAGES = Parts("text", 16, ((0, (0, 1, 2, 3)), (1, (2, 3))))


def item(
    name: bytes, parts: Parts = PAGES, owner: Owner = OWNER, *, durable: bool = True
) -> KVObject:
    random = torch.Generator().manual_seed(name[0])
    size = (owner.num_bytes(parts),)
    memory = torch.randint(256, size, dtype=torch.uint8, generator=random)
    return KVObject(name, parts, memory, durable=durable)


class Heard:
    """What was moved, in bytes, and refused."""

    def __init__(self) -> None:
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.refusals: Counter[str] = Counter()

    def moved(self, tier: str, direction: str, num_bytes: int) -> None:
        self.bytes[tier, direction] += num_bytes

    def refused(self, reason: str) -> None:
        self.refusals[reason] += 1

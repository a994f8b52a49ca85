"""What an engine tells of one image's KV. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

# Where KV can be; an object store is a far disk.
ACTIVE, HOST, DISK, COLD, ABSENT = "active", "host", "disk", "cold", "absent"


@dataclass(frozen=True)
class ImageId:
    """What an engine calls an image file. `digests`: its identities, more than one where a model
    computes an image otherwise in company, or by the detail asked for; `counts`: the tokens of
    each, empty until it has been looked at."""

    digests: tuple[bytes, ...]
    counts: tuple[int, ...] = field(default=(), compare=False)

    @property
    def num_tokens(self) -> int | None:
        """The most that it takes; None until it has been looked at."""
        return max(self.counts, default=None)


@dataclass(frozen=True)
class HeldImage:
    """Where the KV of an image is, and how much there is of it.

    `state`: ACTIVE in the pool, HOST, DISK, COLD or ABSENT. `num_bytes`: of its pages in the
    pool, over all layers. `hits`: how often it was found since it was written there. `kv_format`:
    of a COLD one, of which a request would get what is left in it.
    """

    state: str = ABSENT
    num_tokens: int | None = None
    num_bytes: int = 0
    hits: int = 0
    pinned: bool = False
    kv_format: str | None = None

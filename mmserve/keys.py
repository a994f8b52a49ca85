"""Names of what stands in a sequence, by all that its keys and values depend on.

Owns how such names are made, each a `bytes` that no other kind of name can equal. Knows nothing of
positions or pages.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable

from mmserve.request import ImageSegment, Segment


def of_prompt(segments: tuple[Segment, ...]) -> bytes:
    """A whole prompt."""
    whole = hashlib.sha256()
    for segment in segments:
        if isinstance(segment, ImageSegment):
            whole.update(b"image" + segment.image.digest)
        else:
            run = array("q", segment.token_ids).tobytes()
            whole.update(b"text" + len(run).to_bytes(8, "little") + run)
    return whole.digest()


def of_head(context: bytes, count: int) -> bytes:
    """The first `count` tokens of an image that stands in a context."""
    return hashlib.sha256(b"head%d" % count + context).digest()


def stepped(name: bytes, kind: str) -> bytes:
    """What such a name stands for, held in a format of KV (and maybe brought back from it)."""
    return hashlib.sha256(b"stepped " + kind.encode() + b" " + name).digest()


def unseen(images: Iterable[tuple[int, bytes]]) -> bytes:
    """That text from here on does not see some images before it, by their text index and digest."""
    return b"unseen" + b"".join(sorted(b"%020d" % index + digest for index, digest in images))

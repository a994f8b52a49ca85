"""What stays of a sequence whose oldest text is dropped.

Owns the cut: which text and which images of a list of segments stay. Knows nothing of pages, of
positions or of when to cut.
"""

from __future__ import annotations

from typing import NamedTuple

from mmserve.request import ImageSegment, Segment, Streaming, TextSegment


class Rest(NamedTuple):
    """`segments`: what stays, in order. Counts of what does not: text tokens, shown images."""

    segments: tuple[Segment, ...]
    dropped_tokens: int
    dropped_images: int


def cut(segments: tuple[Segment, ...], streaming: Streaming, keep: int) -> Rest:
    """Without the text between the first `streaming.sinks` and the last `keep` tokens.

    An image that stays keeps its place among what stays. Marked images, which only text that saw
    them still needs, stay nowhere, because all text is computed anew.
    """
    end = sum(len(s.token_ids) for s in segments if isinstance(s, TextSegment)) - keep
    shown = [s for s in segments if isinstance(s, ImageSegment) and not s.marked]
    first = 0  # of the shown images: the first that stays for being one of the last
    if isinstance(streaming.images, int):
        first = max(len(shown) - streaming.images, 0)
    rest: list[Segment] = []
    at = number = kept = 0
    for segment in segments:
        if isinstance(segment, TextSegment):
            ids = segment.token_ids
            ids = ids[: max(streaming.sinks - at, 0)] + ids[max(end - at, 0) :]
            if ids:
                rest.append(TextSegment(ids))
            at += len(segment.token_ids)
        elif not segment.marked:
            digests = streaming.images
            wanted = not isinstance(digests, frozenset) or segment.image.digest in digests
            if at < streaming.sinks or at >= end or (wanted and number >= first):
                rest.append(segment)
                kept += 1
            number += 1
    return Rest(tuple(rest), end - streaming.sinks, len(shown) - kept)

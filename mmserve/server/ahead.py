"""What is computed ahead for conversations, and how much of that may wait.

Owns the bound. It comes behind all that is asked for, so under load it waits for ever, while every
change of a conversation brings more of it: the newest is the likeliest to be of use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mmserve.server.engine_face import Generation

MOST = 8  # at a time


class Ahead:
    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._under_way: list[Generation] = []  # the newest last

    @contextmanager
    def counted(self, generation: Generation) -> Iterator[None]:
        """While it is under way; the oldest makes room for it."""
        self._under_way.append(generation)
        if len(self._under_way) > self._most:
            self._under_way.pop(0).abort()
        try:
            yield
        finally:
            if generation in self._under_way:
                self._under_way.remove(generation)

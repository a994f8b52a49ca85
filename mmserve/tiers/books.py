"""What a tier holds, by name, within its bytes; what was used longest ago leaves first.

Owns sizes and order. No torch; knows nothing of where the bytes are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class Ledger:
    """Names and their sizes in bytes, never more together than `budget`. Not thread-safe."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # least recently used first

    def __contains__(self, name: bytes) -> bool:
        return name in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[bytes]:
        """The last used last."""
        return iter(self._sizes)

    def add(self, name: bytes, size: int) -> list[bytes]:
        """Holds a new name as the last used. Returns what had to leave for it, and has left: in the
        order of use, or the name itself and nothing else where it is larger than the budget."""
        assert name not in self._sizes and size >= 0
        if size > self.budget:
            return [name]
        gone = []
        while self.used + size > self.budget:
            oldest = next(iter(self._sizes))
            self.remove(oldest)
            gone.append(oldest)
        self._sizes[name] = size
        self.used += size
        return gone

    def touch(self, name: bytes) -> None:
        """It is used now; a name that is not held is ignored."""
        if name in self._sizes:
            self._sizes.move_to_end(name)

    def remove(self, name: bytes) -> int:
        """Forgets a name; its size, 0 where it is not held."""
        size = self._sizes.pop(name, 0)
        self.used -= size
        return size

    def check_invariants(self) -> None:
        assert self.used == sum(self._sizes.values()) <= self.budget

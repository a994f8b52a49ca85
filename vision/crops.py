"""Large images in pieces: how many crops are seen beside the overview, and where they lie.

Owns both, from sides in pixels alone. Knows nothing of files, models or tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels


@dataclass(frozen=True)
class Crops:
    """`above`: pixels of the longer side, beyond which an image is cut up without being asked to;
    `most`: crops, at most."""

    above: int
    most: int

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that cut up nothing."""
        if self.above < 1 or self.most < 2:
            raise ValueError(f"crops above {self.above} pixels, at most {self.most}: cut nothing")

    def within(self, tokens: int, each: int) -> Crops | None:
        """For images of at most so many tokens, `each` piece of them so many; None: no room."""
        room = tokens // each - 1  # beside the overview
        return replace(self, most=min(self.most, room)) if room > 1 else None

    def count(self, width: int, height: int, size: int, detail: str) -> int:
        """Of an image that is seen in squares of `size` pixels; 0: it is seen once, as a whole.

        As many as make the longest side of a crop the shortest, though no shorter than what is
        seen of it; of equally good numbers the least.
        """
        if detail == "low" or (detail == "auto" and max(width, height) <= self.above):
            return 0

        def rank(count: int) -> tuple[float, int]:
            return max(size, longer(width, height, best(width, height, count))), count

        found = min(range(1, self.most + 1), key=rank)
        return found if found > 1 else 0


def longer(width: int, height: int, grid: tuple[int, int]) -> float:
    """Pixels of the longer side of a cell; `grid`: rows and columns."""
    rows, columns = grid
    return max(width / columns, height / rows)


def best(width: int, height: int, count: int) -> tuple[int, int]:
    """Rows and columns of so many cells, whose longer side is the shortest there can be."""
    grids = [(rows, count // rows) for rows in range(1, count + 1) if count % rows == 0]
    return min(grids, key=lambda grid: longer(width, height, grid))


def boxes(width: int, height: int, count: int) -> Iterator[Box]:
    """The whole image, then its crops, row by row."""
    yield 0, 0, width, height
    if count:
        rows, columns = best(width, height, count)
        for row in range(rows):
            for column in range(columns):
                left, right = (width * x / columns for x in (column, column + 1))
                top, bottom = (height * y / rows for y in (row, row + 1))
                yield left, top, right, bottom

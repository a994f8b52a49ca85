"""Fonts, words, emoji and pictures that makers draw with, read from one archive.

Owns the archive's form and what in it is held out. Knows nothing of skills or of where its files
come from. `mmserve train --fetch` makes the archive; it needs no network afterwards.
"""

from __future__ import annotations

from pathlib import Path


class AssetsMissingError(ValueError):
    """There is no archive of fonts and pictures to draw with."""


class Assets:
    """The archive at `path`; files are read when a maker first needs them."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise AssetsMissingError(
                f"{path} is missing: `mmserve train --fetch` makes it from free packages."
            )
        self.path = path

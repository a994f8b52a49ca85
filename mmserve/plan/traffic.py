"""What people do: how many, how much they say, how often they show a picture again.

Owns the description and its checks. Knows nothing of models or machines.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Traffic:
    """A conversation shows its pictures in its first request; later ones ask about them. Raises
    ValueError for what cannot be."""

    requests_per_s: float | None = 1.0  # of all replicas together; None: as `sessions` come to
    sessions: int | None = None  # conversations that are open at once
    images: int = 1  # of a conversation
    repeat: float = 0.5  # share of images that others show, too
    seen: float = 10.0  # conversations that show such an image
    prompt_tokens: int = 200  # of a turn
    output_tokens: int = 150  # of a turn
    turns: int = 4
    think_s: float = 20.0  # from an answer to the next turn

    def __post_init__(self) -> None:
        if (self.requests_per_s is None) == (self.sessions is None):
            raise ValueError("traffic is requests_per_s or sessions, one of them")
        for name in ("requests_per_s", "sessions", "prompt_tokens", "output_tokens", "turns"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be more than 0")
        if self.images < 0 or self.think_s < 0:
            raise ValueError("images and think_s cannot be less than 0")
        if not 0 <= self.repeat <= 1:
            raise ValueError("repeat is a share from 0 to 1")
        if self.seen < 1:
            raise ValueError("an image that others show, too, is seen by 1 or more")

    def text_tokens(self, turns: float) -> float:
        """Of a conversation after so many turns."""
        return turns * (self.prompt_tokens + self.output_tokens)

    @property
    def new_share(self) -> float:
        """Of images shown, that nobody has shown before."""
        return 1 - self.repeat + self.repeat / self.seen


def read_traffic(path: Path | None, given: dict[str, Any]) -> Traffic:
    """The file's fields, and those given instead. Raises ValueError."""
    values: Any = {}
    if path is not None:
        try:
            values = json.loads(path.read_text())
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise ValueError(f"{path} is no JSON object")
    kinds = {field.name: str(field.type) for field in dataclasses.fields(Traffic)}
    for name, value in values.items():
        if name not in kinds:
            raise ValueError(f"{path}: {name!r} is none of {', '.join(kinds)}")
        whole = "int" in kinds[name]
        wanted: Any = int if whole else (int, float)
        if value is not None and (isinstance(value, bool) or not isinstance(value, wanted)):
            raise ValueError(f"{path}: {name} must be a {'whole ' if whole else ''}number")
    for one, other in (("sessions", "requests_per_s"), ("requests_per_s", "sessions")):
        if one in given:  # takes the other's place
            values = {**values, other: None}
    values = {**values, **given}
    if values.get("sessions") is not None:
        values.setdefault("requests_per_s", None)
    return Traffic(**values)

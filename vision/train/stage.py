"""What one stage of training is made of: one JSON of `configs/train/`, as a frozen dataclass.

Owns the JSON's words and their units. Knows nothing of tensors or of what skills there are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmserve.vision.crops import Crops

REST = "*"
TEXT = 64  # tokens of a dialogue beside its images, at least


@dataclass(frozen=True)
class Rates:
    """Peak learning rates."""

    encoder: float
    compressor: float
    lora: float


@dataclass(frozen=True)
class Latents:
    """What the compressor becomes: its grid, and with which chance an example is shown with how
    many of the first latents. `details`: what a served image gets by its detail."""

    grid: tuple[int, int]
    chances: Mapping[int, float]
    details: Mapping[str, int]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted(self.chances))


@dataclass(frozen=True)
class Packing:
    """A shard is `rows` of `tokens`, with at most `images`, of which one that is cut up is as many
    as its pieces; an update takes `shards`."""

    rows: int = 8
    tokens: int = 512
    images: int = 40
    shards: int = 8


@dataclass(frozen=True)
class Distillation:
    """Text-only chats that the base model wrote, whose distribution is to be kept: `tokens` of
    answers in all, `rows` an update; `weight` of the divergence beside the answers' loss."""

    tokens: int = 250_000
    rows: int = 6
    weight: float = 3.0


@dataclass(frozen=True)
class Stage:
    """The mixture goes by the updates planned; the rates go by those or by the minutes, whichever
    is further, so that a training that is over in time has come down to nothing."""

    name: str
    model: str  # what is trained further: as `--model`
    seed: int
    updates: int
    minutes: float  # of training, all calls together
    rates: Rates
    latents: Latents
    # Of skills: weight in the beginning and at the end; `*` stands for those that are not named.
    mixture: Mapping[str, tuple[float, float]]
    frozen: tuple[str, ...] = ()  # parts of the vision model that stay as they are
    packing: Packing = field(default_factory=Packing)
    text: Distillation = field(default_factory=Distillation)
    crops: Crops | None = None  # how large images are cut up, if they are
    enlarged: float = 0.0  # share of examples with one picture that show it so large that it is

    def __post_init__(self) -> None:
        """Raises ValueError for images that find no room, and for what is no share of examples."""
        pieces = 1 if self.crops is None else 1 + self.crops.most
        latents, packing = self.latents.sizes[-1], self.packing
        if packing.tokens < pieces * latents + TEXT:
            raise ValueError(
                f"a row of {packing.tokens} tokens has no room for an image of {pieces} x "
                f"{latents} and {TEXT} of text"
            )
        if not 0 <= self.enlarged <= 1:
            raise ValueError(f"enlarged is a share of 0 to 1, not {self.enlarged}")
        if self.enlarged and self.crops is None:
            raise ValueError("enlarges pictures for crops, and declares none")
        if packing.images < pieces:
            raise ValueError(
                f"a shard of {packing.images} images has no room for one in {pieces} pieces"
            )

    def weights(self, skills: Iterable[str], progress: float) -> dict[str, float]:
        """Of each skill, when so much of the updates is done."""
        at, rest = min(max(progress, 0.0), 1.0), self.mixture.get(REST, (0.0, 0.0))
        ends = {skill: self.mixture.get(skill, rest) for skill in skills}
        return {skill: first + (last - first) * at for skill, (first, last) in ends.items()}


def load_stage(path: Path) -> Stage:
    """Raises ValueError for a file that says something else, OSError for none."""
    try:
        data: dict[str, Any] = json.loads(path.read_text("utf-8"))
        latents = data.pop("latents")
        chances = {int(count): float(chance) for count, chance in latents["chances"].items()}
        rows, columns = latents["grid"]
        mixture = {skill: _ends(weight) for skill, weight in data.pop("mixture").items()}
        if not mixture:
            raise ValueError("the mixture is empty")
        return Stage(
            rates=Rates(**data.pop("rates")),
            latents=Latents((rows, columns), chances, latents.get("details", {})),
            mixture=mixture,
            frozen=tuple(data.pop("frozen", ())),
            packing=Packing(**data.pop("packing", {})),
            text=Distillation(**data.pop("text", {})),
            crops=Crops(**data.pop("crops")) if "crops" in data else None,
            **data,
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no stage of training: {error}") from error


def _ends(weight: Any) -> tuple[float, float]:
    first, last = weight if isinstance(weight, list) else (weight, weight)
    if min(first, last) < 0:
        raise ValueError(f"a weight is {weight}")
    return float(first), float(last)

"""Shards of examples, drawn by worker processes: the i-th is a function of the stage and i.

Owns which examples a shard has. Knows nothing of devices, and nothing of how they are learned.
"""

from __future__ import annotations

import multiprocessing
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from mmserve.vision.train.assets import Assets
from mmserve.vision.train.dialogue import Dialogue, Scribe
from mmserve.vision.train.example import Example, Split
from mmserve.vision.train.packing import Packer, Shard
from mmserve.vision.train.skills import LARGE, SKILLS, example, mixed
from mmserve.vision.train.stage import REST, Stage

AHEAD = 4  # shards that each worker has ready


@dataclass(frozen=True)
class Drawing:
    """What a worker needs."""

    stage: Stage
    assets: Assets
    scribe: Scribe
    image_size: int

    def __post_init__(self) -> None:
        """Raises ValueError for a mixture of skills that there are none of, or of large pictures
        that are not cut up."""
        known, named = (*SKILLS, *LARGE), self.stage.mixture.keys()
        if strange := sorted(named - {*known, REST}):
            raise ValueError(f"no skill is called {strange[0]}; known are {', '.join(known)}")
        if self.stage.crops is None and (large := sorted(named & LARGE.keys())):
            raise ValueError(f"{large[0]} is for a model that sees crops; the stage declares none")

    @property
    def latents(self) -> int:
        """Of an image or a piece of one, at most."""
        return self.stage.latents.sizes[-1]

    @property
    def packer(self) -> Packer:
        return Packer(self.stage.packing, self.image_size, self.latents)

    def weights(self, progress: float) -> dict[str, float]:
        """Of each skill of the mixture, when so much of the updates is done."""
        return self.stage.weights(mixed(self.stage.mixture), progress)

    def dialogue(
        self, made: Example, latents: int, rng: random.Random, *, scored: bool = False
    ) -> Dialogue:
        """As served: with so many latents of each image, or all where one is cut up."""
        crops, size = self.stage.crops, self.image_size
        if crops and any(crops.count(i.width, i.height, size, "auto") for i in made.images):
            latents = self.latents
        return self.scribe.write(made, latents, rng, crops=crops, scored=scored)

    def shard(self, number: int) -> Shard:
        planned = self.stage.updates * self.stage.packing.shards
        return self.packer.pack(self._dialogues(number, number / planned))[0]

    def _dialogues(self, number: int, progress: float) -> Iterator[Dialogue]:
        stage = self.stage
        rng = random.Random(f"{stage.seed} shard {number}")
        weights = self.weights(progress)
        while True:
            (skill,) = rng.choices([*weights], [*weights.values()])
            (latents,) = rng.choices([*stage.latents.chances], [*stage.latents.chances.values()])
            index = rng.getrandbits(48)
            try:
                made = example(skill, Split.TRAIN, seed=stage.seed, index=index, assets=self.assets)
                yield self.dialogue(self._sized(made, rng), latents, rng)
            except Exception as error:  # one of a million must not end hours of training
                warnings.warn(f"{skill} {index} is left out: {error!r}", stacklevel=1)

    def _sized(self, made: Example, rng: random.Random) -> Example:
        """Crops of small things alone would teach that large ones are none."""
        crops, share = self.stage.crops, self.stage.enlarged
        if crops is None or not share or rng.random() >= share:
            return made
        if len(made.images) != 1 or max(made.images[0].size) > crops.above:
            return made  # several would hardly find room
        return made.enlarged(rng.randint(crops.above + 1, 2 * crops.above))


class _Shards(IterableDataset[Shard]):
    """From the `first` on; with workers each makes every so manieth, and they come in order."""

    def __init__(self, drawing: Drawing, first: int) -> None:
        self._drawing, self._first = drawing, first

    def __iter__(self) -> Iterator[Shard]:
        torch.set_num_threads(1)
        worker = get_worker_info()
        offset, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number in count(self._first + offset, step):
            yield self._drawing.shard(number)


def stream(drawing: Drawing, first: int, workers: int, pinned: bool) -> Iterator[Shard]:
    """Shards from the `first` on, in order however many `workers` make them (0: this process)."""
    # A fork of this process would inherit a GPU's context and the locks of its threads, and a new
    # interpreter for each worker would import PyTorch while the next one waits for it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", __name__])
    loader = DataLoader(
        _Shards(drawing, first),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=AHEAD if workers else None,
        pin_memory=pinned,
        multiprocessing_context=context if workers else None,
    )
    return iter(loader)

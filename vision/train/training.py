"""The updates of a training, until its time is over, and what lets it go on where it ended.

Owns the optimiser, the rates and the state on disk. Knows nothing of how losses come about.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from mmserve.vision.train.feed import Feed
from mmserve.vision.train.learner import Learner
from mmserve.vision.train.stage import Stage
from mmserve.vision.train.texts import TextRows
from mmserve.whole_file import replacing

WARM_UP = 100  # updates
SAVE_S = 120.0  # between two states that are kept
TOLD = 20  # updates between two lines of the log
DECAY = {"encoder": 0.01, "compressor": 0.03, "lora": 0.0}


class DivergedError(RuntimeError):
    """The loss is no number any more; the state that was kept last is from before."""


class Training:
    """Of what `learner` trains. `updates`: done so far; `taken`: shards, likewise."""

    def __init__(self, learner: Learner, stage: Stage, device: torch.device, folder: Path) -> None:
        """`folder`: for the state and the log. Raises ValueError for a stage that does not fit."""
        self._learner, self._stage, self._device = learner, stage, device
        self._state, self.log = folder / "state.pt", folder / "log.jsonl"
        groups = learner.groups(stage.frozen)
        rates = asdict(stage.rates)
        self._optimiser = torch.optim.AdamW(
            [{"params": p, "peak": rates[g], "weight_decay": DECAY[g]} for g, p in groups.items()],
            betas=(0.9, 0.98),
            fused=device.type == "cuda",
        )
        self._parameters = [p for group in groups.values() for p in group]
        self.updates = self.taken = 0
        self._spent_s = 0.0

    # -- what outlives the process ----------------------------------------------------------------

    def resume(self) -> bool:
        """Go on where this training ended, if it has begun. Raises ValueError for another's."""
        if not self._state.is_file():
            return False
        state = torch.load(self._state, map_location=self._device, weights_only=True)
        if state["stage"] != self._stage.name:
            raise ValueError(f"{self._state} is of {state['stage']}, not of {self._stage.name}")
        self._learner.vision.load_state_dict(state["vision"])
        self._learner.lora.load(state["lora"])
        self._optimiser.load_state_dict(state["optimiser"])
        self.updates, self.taken = state["updates"], state["taken"]
        self._spent_s = state["spent_s"]
        return True

    def save(self) -> None:
        state = {
            "stage": self._stage.name,
            "vision": self._learner.vision.state_dict(),
            "lora": self._learner.lora.tensors(),
            "optimiser": self._optimiser.state_dict(),
            "updates": self.updates,
            "taken": self.taken,
            "spent_s": self._spent_s,
        }
        with replacing(self._state) as part:
            torch.save(state, part)

    # -- updates ----------------------------------------------------------------------------------

    @property
    def progress(self) -> float:
        """0 to 1: by updates or by time, whichever is further."""
        by_time = self._spent_s / (60 * self._stage.minutes)
        return min(1.0, max(self.updates / self._stage.updates, by_time))

    def run(
        self, feed: Feed, text: TextRows | None, deadline: float, keep: Callable[[], None]
    ) -> None:
        """Until `time.monotonic` reaches `deadline`, or the stage is over. `keep` is called at
        intervals and at the end. Raises DivergedError."""
        first, before, begun = self.taken, self._spent_s, time.monotonic()
        kept, recent = begun, list[Tensor]()
        bar = tqdm(total=self._stage.updates, initial=self.updates, unit="update", mininterval=5)
        with bar, self.log.open("a", encoding="utf-8") as log:
            while self.progress < 1 and time.monotonic() < deadline:
                recent.append(self._update(feed, text))
                bar.update()
                self.updates += 1
                now = time.monotonic()
                self._spent_s, self.taken = before + now - begun, first + feed.taken
                if self.updates % TOLD == 0:
                    said = self._line(recent, feed.waited_s / (now - begun))
                    recent = []
                    log.write(json.dumps(said) + "\n")
                    log.flush()
                    bar.set_postfix({k: said[k] for k in ("loss", "right", "kl", "waited")})
                if now - kept > SAVE_S:
                    kept = now
                    self._check(recent)
                    keep()
        self._check(recent)
        keep()

    def rehearse(self, feed: Feed, text: TextRows | None) -> None:
        """An update's work without its effect, so that all is compiled."""
        self._loss(feed, text)[0].backward()  # type: ignore[no-untyped-call]
        self._optimiser.zero_grad()

    def _loss(self, feed: Feed, text: TextRows | None) -> tuple[Tensor, Tensor]:
        batch = feed.batch()
        generator = torch.Generator(self._device).manual_seed(self._stage.seed + self.updates)
        losses = self._learner.losses(batch, self._some(text), generator)
        total = losses.answers + self._stage.text.weight * losses.divergence
        return total, torch.stack([part.detach() for part in losses])

    def _some(self, text: TextRows | None) -> TextRows | None:
        """Rows for one update, always as many."""
        if text is None:
            return None
        rng = random.Random(f"{self._stage.seed} text {self.updates}")
        return text.take(rng.choices(range(len(text.tokens)), k=self._stage.text.rows))

    def _update(self, feed: Feed, text: TextRows | None) -> Tensor:
        total, told = self._loss(feed, text)
        total.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        factor = self._factor()
        for group in self._optimiser.param_groups:
            group["lr"] = group["peak"] * factor
        self._optimiser.step()
        self._optimiser.zero_grad()
        return torch.cat([told, norm.detach()[None]])

    def _factor(self) -> float:
        """Of the peak rates: up at first, then down along a cosine."""
        fall = 0.5 + 0.5 * math.cos(math.pi * self.progress)
        return min(1.0, (self.updates + 1) / WARM_UP) * fall

    def _line(self, recent: list[Tensor], waited: float) -> dict[str, Any]:
        self._check(recent)
        loss, right, divergence, norm = torch.stack(recent).mean(0).tolist()
        return {
            "update": self.updates,
            "seconds": round(self._spent_s, 1),
            "shards": self.taken,
            "loss": round(loss, 4),
            "right": round(right, 4),
            "kl": round(divergence, 5),
            "norm": round(norm, 2),
            "factor": round(self._factor(), 4),
            "waited": round(waited, 3),
        }

    def _check(self, recent: list[Tensor]) -> None:
        """Before anything is kept of it."""
        if recent and not math.isfinite(torch.stack(recent).sum().item()):
            raise DivergedError(
                f"the loss is no number at update {self.updates}; the state that was kept last is "
                "from before, and lower rates may get further"
            )

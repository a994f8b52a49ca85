"""The training of a head: updates until the time is over, kept at intervals.

Owns the optimiser, its schedule, and what lets a training go on where one ended. Knows nothing of
engines or of how texts came to be.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmserve.train_drafter.corpus import Corpus
from mmserve.train_drafter.unroll import Trained, Vocabulary, accepted_length, loss, right
from mmserve.whole_file import replacing

WARM_UP = 0.03  # of the whole training
SAVE_S = 60.0  # between two states that are kept
LOWEST = 0.02  # of the rate, at the end


@dataclass(frozen=True)
class Plan:
    """`steps`: guesses in a row; `batch_tokens`: with padding; a training ends `seconds` after it
    has begun or been gone on with, or with `updates`, whichever is first."""

    steps: int
    rate: float
    batch_tokens: int
    seconds: float
    updates: int
    seed: int


class Training:
    """Of `module`'s parameters, by `trained`."""

    def __init__(
        self,
        module: nn.Module,
        trained: Trained,
        corpus: Corpus,
        vocabulary: Vocabulary,
        plan: Plan,
        state_file: Path,
    ) -> None:
        self._module, self._trained = module, trained
        self._corpus, self._vocabulary, self._plan = corpus, vocabulary, plan
        self._state_file = state_file
        whole = [p for p in module.parameters() if p.dim() > 1]
        rest = [p for p in module.parameters() if p.dim() < 2]
        groups: Any = [{"params": whole}, {"params": rest, "weight_decay": 0.0}]
        self._optimiser = torch.optim.AdamW(groups, plan.rate, (0.9, 0.95), weight_decay=0.01)
        self.updates = 0
        self._epoch = 0
        self._spent, self._seconds = 0.0, plan.seconds  # with what was spent before, if it goes on
        self._recent: Tensor | None = None

    def resume(self) -> bool:
        """Go on where a training of the same plan ended, if there is one."""
        if not self._state_file.is_file():
            return False
        state = torch.load(self._state_file, weights_only=True)
        self._module.load_state_dict(state["module"])
        self._optimiser.load_state_dict(state["optimiser"])
        self.updates, self._epoch, self._spent = state["updates"], state["epoch"], state["spent"]
        return True

    def run(self, save: Callable[[], None], say: Callable[[str], None]) -> None:
        """`save` is called at intervals and at the end."""
        device = self._corpus.tokens.device
        half = device.type == "cuda"
        rounding = torch.autocast("cuda", torch.bfloat16) if half else nullcontext()
        started = kept = time.monotonic()
        before = self._spent
        self._seconds = before + self._plan.seconds
        while True:
            for chats in self._corpus.batches(self._plan.batch_tokens, self._seed()):
                self._spent = before + time.monotonic() - started
                if self._progress() >= 1:
                    self._keep()
                    return save()
                with rounding:
                    self._update(self._corpus.batch(chats))
                if self.updates % 50 == 0:
                    say(self._line())
                if time.monotonic() - kept > SAVE_S:
                    kept = time.monotonic()
                    self._keep()
                    save()
            self._epoch += 1

    def _update(self, batch: Any) -> None:
        rate = self._plan.rate * self._factor(self._progress())
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        value = loss(self._trained, batch, self._vocabulary, self._plan.steps)
        self.updates += 1
        if not value.requires_grad:
            return  # nothing of an answer in it
        value.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._module.parameters(), 1.0)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        now = value.detach()
        self._recent = now if self._recent is None else self._recent * 0.98 + now * 0.02

    def _progress(self) -> float:
        return max(self._spent / self._seconds, self.updates / self._plan.updates)

    @staticmethod
    def _factor(progress: float) -> float:
        if progress < WARM_UP:
            return max(progress / WARM_UP, 0.01)
        return LOWEST + (1 - LOWEST) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))

    def _seed(self) -> int:
        return self._plan.seed + 1000 * self._epoch

    def _line(self) -> str:
        shown = math.nan if self._recent is None else float(self._recent)
        done = 100 * min(self._progress(), 1.0)
        return f"{done:3.0f} %, update {self.updates}, epoch {self._epoch}, loss {shown:.3f}"

    def _keep(self) -> None:
        self._state_file.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "module": self._module.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "updates": self.updates,
            "epoch": self._epoch,
            "spent": self._spent,
        }
        with replacing(self._state_file, lasts=False) as part:
            torch.save(state, part)


@torch.no_grad()
def acceptance(trained: Trained, corpus: Corpus, vocabulary: Vocabulary, plan: Plan) -> float:
    """Tokens of answers a step, drafting `plan.steps` each time: 1 is what a step makes alone."""
    tokens = steps = 0
    for chats in corpus.batches(plan.batch_tokens, 0):
        batch = corpus.batch(chats)
        more, taken = accepted_length(right(trained, batch, vocabulary, plan.steps), batch.answers)
        tokens, steps = tokens + more, steps + taken
    return tokens / max(steps, 1)

"""transformers' own generation on the weights of the run, before the engine takes them.

Owns its two front ends: `generate` and continuous batching. Knows nothing of our engine.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from mmserve.bench.peer import Speed, timed_generate
from mmserve.bench.suite import Case, Line
from mmserve.model.loader import LoadedModel

OUTPUT_TOKENS = 32


@dataclass
class PeerCases:
    """`speeds` fills with the tokens/s of `generate`, by (sequences, context)."""

    loaded: LoadedModel
    decode: Sequence[tuple[int, int]]
    speeds: dict[tuple[int, int], float] = field(default_factory=dict)

    def generate(self) -> list[Case]:
        cases = []
        for batch, context in self.decode:
            name = f"transformers generate {batch} x {context}"
            cases.append(Case(name, functools.partial(self._generate, name, batch, context)))
        return cases

    def continuous(self) -> list[Case]:
        """Takes most of a GPU's memory and keeps it: for a process of its own."""
        cases = []
        for batch, context in self.decode:
            name = f"transformers continuous batching {batch} x {context}"
            cases.append(Case(name, functools.partial(self._continuous, name, batch, context)))
        return cases

    def _prompts(self, batch: int, context: int) -> Tensor:
        generator = torch.Generator().manual_seed(batch + context)
        vocab = self.loaded.tokenizer.get_vocab_size()
        ids = torch.randint(vocab // 2, vocab, (batch, context), generator=generator)
        return ids.to(self.loaded.device)

    def _generate(self, name: str, batch: int, context: int) -> Iterator[Line]:
        timed_generate(self.loaded.lm, _inputs(self._prompts(batch, 8)), 2)
        ids = self._prompts(batch, context)
        started = time.perf_counter()
        times = timed_generate(self.loaded.lm, _inputs(ids), OUTPUT_TOKENS)
        speed = Speed.of([times] * batch, time.perf_counter() - started, together=True)
        rate = speed.decode_tokens_per_s
        self.speeds[batch, context] = rate
        figures = {"ms a step": 1e3 * batch / rate, "ms to the first token": speed.ttft_ms}
        yield Line(name, rate, "tokens/s", None, figures)

    def _continuous(self, name: str, batch: int, context: int) -> Iterator[Line]:
        """All tokens over the time from the first start to the last end, by its own stamps.

        Prompts are included, its start-up is not.
        """
        lm: Any = self.loaded.lm
        asked = GenerationConfig(
            max_new_tokens=OUTPUT_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        prompts = self._prompts(batch, context).tolist()
        answers = list(lm.generate_batch(prompts, generation_config=asked).values())
        seconds = max(a.lifespan[1] for a in answers) - min(a.lifespan[0] for a in answers)
        tokens = sum(len(answer.generated_tokens) for answer in answers)
        yield Line(name, tokens / seconds, "tokens/s", None, {"s, prompts included": seconds})


def _inputs(ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

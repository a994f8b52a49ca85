"""What windows in the default model's layers would cost in quality, without training.

Run: python tests/checks/window_quality.py [--contexts 2048 4096 8192]   (prints rows of
docs/models.md)

Five of six layers read the last W tokens and the first few, the sinks; every sixth reads all. In
each prompt something is said or shown, then comes other text up to the context's length, then a
question. The model as it is answers greedily; what the windows change is measured at each place of
its answer: how much less likely they hold its token, and how far their distribution is from its
own. That is in dense passes, float32, so that sinks can be tried, which no engine's windows have
yet.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

sys.path.append(str(Path(__file__).parents[2]))

import torch
from torch import Tensor

from mmserve.bench.chat import asked, chat
from mmserve.bench.drafts import LOOKS, QUESTIONS
from mmserve.bench.pictures import draw
from mmserve.bench.quality_session import Segments, Session
from mmserve.config import CacheConfig, EngineConfig, ModelConfig, SpecConfig
from mmserve.engine.engine import Engine
from mmserve.model.loader import LoadedModel, load_model
from mmserve.prompt import Message, TextPart
from mmserve.request import ImageSegment, TextSegment
from tests.model.dense import LayerMasks, additive, embed, image_mask, windowed_mask

ROOT = Path(__file__).parents[2]
FULL_EVERY = 6  # layers: five windows, then one that reads all
ANSWER_TOKENS = 48
FILLERS = ("docs/api.md", "docs/sessions.md", "docs/operations.md", "docs/images.md")


class Pattern(NamedTuple):
    """Window and sinks of the layers that have them, in tokens."""

    window: int
    sinks: int


PATTERNS = (
    *(Pattern(window, 4) for window in (512, 1024, 2048)),
    Pattern(1024, 0),
)


class Asked(NamedTuple):
    """A prompt, and what the model as it is answers."""

    prompt: Segments
    answer: tuple[int, ...]


def fillers() -> str:
    """Plain text that there is enough of."""
    return "\n".join((ROOT / name).read_text("utf-8") for name in FILLERS)


def filled(engine: Engine, number: int, budget: int) -> Iterator[Message]:
    """Turns about other things, of so many tokens or somewhat fewer."""
    ids = engine.tokenizer.encode(fillers())
    at, turn = 3000 * number, 200  # the template's own tokens and the answer's take another 30
    while budget > turn + 30:
        text = engine.tokenizer.decode(ids[at : at + turn])
        yield asked(text)
        yield Message("assistant", (TextPart("I have read it."),))
        at, budget = at + turn, budget - turn - 30


def prompts(engine: Engine, context: int, count: int) -> dict[str, list[Segments]]:
    """By kind: a text to be gone on with, a picture that is asked about again, two pictures."""
    found: dict[str, list[Segments]] = {"text": [], "image": [], "turns": []}
    room = context - 200 - ANSWER_TOKENS
    for n in range(count):
        others = list(filled(engine, n, room))
        said = Message("assistant", (TextPart("It shows several shapes."),))
        found["text"].append(chat(engine, [*others, asked(QUESTIONS[n])]))
        shown = [asked(LOOKS[1], draw(f"quality {n}")), said, *others]
        found["image"].append(chat(engine, [*shown, asked("What shapes are in the image?")]))
        half = len(others) // 4 * 2
        later = [*shown[: 2 + half], asked("And this one?", draw(f"quality {n + 9}")), said]
        ends = asked("What differs between the two images?")
        found["turns"].append(chat(engine, [*later, *shown[2 + half :], ends]))
    return found


class Windows:
    """The model with other masks."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._lm = cast(Any, loaded.lm)
        self._layers = LayerMasks(self._lm, lambda number: int((number + 1) % FULL_EVERY != 0))

    @torch.inference_mode()
    def logits(
        self, embeds: Tensor, image_of: Sequence[int], pattern: Pattern | None, last: int
    ) -> Tensor:
        """Log-probabilities [last, vocabulary] of what follows the last so many tokens."""
        whole = additive(image_mask(image_of))
        own = additive(windowed_mask(image_of, *pattern)) if pattern else whole
        self._layers.masks = whole, own
        hidden = self._lm.model(inputs_embeds=embeds[None], use_cache=False).last_hidden_state
        return torch.log_softmax(self._lm.lm_head(hidden[0, -last:]).float(), -1)


def answered(engine: Engine, context: int, count: int) -> dict[str, list[Asked]]:
    session = Session(engine, ANSWER_TOKENS)
    found = {}
    for kind, each in prompts(engine, context, count).items():
        said = session.answers(each)
        found[kind] = [Asked(p, s.tokens) for p, s in zip(each, said, strict=True)]
    return found


def measure(windows: Windows, loaded: LoadedModel, asked: Sequence[Asked]) -> list[list[float]]:
    """By pattern: log-likelihood lost a token, divergence, share of the same best token."""
    sums = [[0.0] * 3 for _ in PATTERNS]
    places = 0
    for prompt, answer in asked:
        whole = (*prompt, TextSegment(answer[:-1]))
        embeds, image_of = embed(loaded, whole)
        own = windows.logits(embeds, image_of, None, len(answer))
        token = torch.tensor(answer)[:, None]
        places += len(answer)
        for total, pattern in zip(sums, PATTERNS, strict=True):
            if pattern.window >= len(image_of):
                continue
            other = windows.logits(embeds, image_of, pattern, len(answer))
            total[0] += float((other.gather(1, token) - own.gather(1, token)).sum())
            total[1] += float((own.exp() * (own - other)).sum())
            total[2] += float((own.argmax(-1) == other.argmax(-1)).sum())
    return [[value / places for value in total] for total in sums]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--count", type=int, default=4, help="prompts of a kind")
    args = parser.parse_args()
    torch.set_num_threads(2)
    model = ModelConfig(device="cpu")
    config = EngineConfig(model=model, cache=CacheConfig(), speculative=SpecConfig(method=None))
    engine, loaded = Engine(config, load_model(model)), load_model(model)
    windows = Windows(loaded)
    for context in args.contexts:
        for kind, each in answered(engine, context, args.count).items():
            length = sum(
                s.image.num_tokens if isinstance(s, ImageSegment) else len(s.token_ids)
                for s in each[0].prompt
            )
            measured = measure(windows, loaded, each)
            for pattern, (lost, nats, same) in zip(PATTERNS, measured, strict=True):
                print(
                    f"| {context} ({length}) | {kind} | {pattern.window} | {pattern.sinks} "
                    f"| {lost:+.4f} | {nats:.4f} | {100 * same:.1f} % |",
                    flush=True,
                )
    engine.close()


if __name__ == "__main__":
    main()

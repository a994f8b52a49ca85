"""How far answers in blend mode are from those in prefix mode, by k: tokens computed in context.

Run: python tests/checks/blend_divergence.py [--steps 64]   (prints the rows of docs/models.md)

Each cell has two figures over the same prompts and pictures: the share of greedy tokens that are
the reference's until the first that differs, and the mean KL divergence of the next-token
distributions at the answer's first token, from the reference's to the other's, in nats. The models:
the default one, which was trained for isolated images, and tiny random checkpoints with more than
32 tokens an image.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[2]))

import torch
from torch import Tensor

from mmserve.config import MIB, CacheConfig, EngineConfig, ModelConfig
from mmserve.engine.engine import Engine
from mmserve.model.weights import load
from mmserve.prompt import ImagePart, Message, TextPart
from mmserve.request import SamplingParams
from tests.checks.served import picture
from tests.engine.driver import Driver
from tests.model import families

PAGE = 16
HEADS = (16, 32, 64, 128)
NATIVE = "smolvision-135m"
SCALE = 256  # tokens of the largest picture that a Qwen processor is asked for
# Of the tiny processors' own settings: pictures as large as their towers take.
SETTINGS: dict[str, Mapping[str, Any]] = {
    "qwen2_5_vl": {"size": {"shortest_edge": 14**2, "longest_edge": SCALE * 14**2}},
    "qwen3_vl": {"size": {"shortest_edge": 16**2, "longest_edge": SCALE * 16**2}},
}
FAMILIES = ("llava_onevision", "pixtral", "qwen2_5_vl", "qwen3_vl")
TEXTS = (
    ("", "What is in the image?"),
    ("Look at this picture.", "What color is the shape?"),
    ("Answer in one word.", "Is there a circle in the image?"),
    ("I found this on my desk this morning and do not know what to make of it:", "Describe it."),
    ("Please look closely at every picture that I send. " * 4, "How many shapes are there?"),
    ("First a riddle: what has keys but opens no locks? Now to something else.", "What is this?"),
)


class Answers(NamedTuple):
    """By prompt: greedy tokens, and the log-probabilities [vocab] of the first."""

    tokens: list[list[int]]
    first: list[Tensor]
    num_image_tokens: int  # of the largest image


@dataclass(frozen=True)
class Subject:
    """A model and what it is shown. `pool`: bytes of either KV pool: room for all prompts, and
    few pages, because every step checks the books of all."""

    model: ModelConfig
    pictures: list[bytes]
    pool: int
    steps: int

    def answers(self, mode: str, head: int = PAGE) -> Answers:
        model = replace(self.model, device="cpu", vision_mode=mode, blend_tokens=head)
        cache = CacheConfig(page_size=PAGE, text_bytes=self.pool, vision_bytes=self.pool)
        engine = Engine(EngineConfig(model, cache), load(model))
        driver, params = Driver(engine), SamplingParams(max_tokens=self.steps, temperature=0.0)
        requests, sizes = [], []
        for before, after in TEXTS:
            for data in self.pictures:
                image = engine.pipeline.prepare(data)
                sizes.append(image.num_tokens)
                head_part = (TextPart(before),) if before else ()
                message = Message("user", (*head_part, ImagePart(data), TextPart(after)))
                prompt = engine.template.render([message], [image])
                requests.append(driver.submit(prompt.segments, params))
        driver.run()
        first = [driver.logits[request][0].double().log_softmax(-1) for request in requests]
        return Answers([driver.tokens(request) for request in requests], first, max(sizes))


def compared(wanted: Answers, got: Answers) -> str:
    """One cell: equal tokens, KL."""
    equal = total = 0
    for right, other in zip(wanted.tokens, got.tokens, strict=True):
        pairs = zip(right, other, strict=False)
        equal += next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(right), len(other)))
        total += len(right)
    kl = [float((p.exp() * (p - q)).sum()) for p, q in zip(wanted.first, got.first, strict=True)]
    return f"{equal / total:.0%}, {sum(kl) / len(kl):.2g}"


def family_row(name: str, folder: Path, steps: int) -> list[str]:
    """Model, tokens of an image, reference, a cell for each of `HEADS`, all, isolated."""
    pictures = []
    for seed in (3, 6):
        file = io.BytesIO()
        families.picture(seed, 224, 224).save(file, "PNG")
        pictures.append(file.getvalue())
    folder = families.build(name, folder)
    model = ModelConfig(model=str(folder), processor_kwargs=SETTINGS.get(name, {}))
    subject = Subject(model, pictures, 8 * MIB, steps)
    exact = subject.answers("prefix")
    count = exact.num_image_tokens
    cells = [compared(exact, subject.answers("blend", k)) if k < count else "" for k in HEADS]
    whole = compared(exact, subject.answers("blend", -(-count // PAGE) * PAGE))
    return [name, str(count), "prefix", *cells, whole, ""]


def native_rows(steps: int) -> Iterator[list[str]]:
    """The same columns, against either exact mode."""
    pictures = [picture(seed) for seed in (1, 2, 5, 9)]
    subject = Subject(ModelConfig(model=NATIVE, dtype="float32"), pictures, 256 * MIB, steps)
    exact = {mode: subject.answers(mode) for mode in ("prefix", "isolated")}
    count = exact["prefix"].num_image_tokens
    heads = [k for k in HEADS if k < count] + [-(-count // PAGE) * PAGE]
    *some, whole = [subject.answers("blend", k) for k in heads]
    gaps = [""] * (len(HEADS) - len(some))
    for mode, wanted in exact.items():
        cells = [compared(wanted, other) for other in some]
        ends = [compared(wanted, other) for other in (whole, exact["isolated"])]
        yield [NATIVE, str(count), mode, *cells, *gaps, *ends]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=64, help="tokens of each answer at most")
    steps = parser.parse_args().steps
    heads = [f"k = {k}" for k in HEADS]
    titles = ["Model", "Image tokens", "Reference", *heads, "all", "isolated"]
    print("| " + " | ".join(titles) + " |\n|" + " --- |" * len(titles))
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        tiny = (family_row(name, Path(folder), steps) for name in FAMILIES)
        for row in chain(native_rows(steps), tiny):
            print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()

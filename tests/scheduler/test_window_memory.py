"""What a hybrid model's sequence costs: bytes of KV in use, by the books alone."""

from __future__ import annotations

import pytest

from mmserve.cache.layer_group import LayerGroup
from mmserve.cache.page_pool import PagePool
from mmserve.cache.pool_sizes import text_budgets, vision_budgets
from mmserve.cache.radix_cache import RadixCache
from mmserve.cache.vision_index import VisionIndex
from mmserve.config import GIB, SchedulerConfig
from mmserve.request import (
    ImageInput,
    ImageSegment,
    Request,
    SamplingParams,
    Segment,
    TextSegment,
)
from mmserve.scheduler.scheduler import Scheduler
from mmserve.sequence import Sequence

# Gemma 3 4B: 34 layers, every sixth sees everything; 4 heads of 256 for K and for V in bfloat16.
WINDOW, PAGE, LAYER_BYTES = 1024, 16, 2 * 4 * 256 * 2
GROUPS = (
    LayerGroup(tuple(n for n in range(34) if n % 6 == 5)),
    LayerGroup(tuple(n for n in range(34) if n % 6 != 5), window=WINDOW),
)
PAGE_BYTES = [len(group.layers) * LAYER_BYTES * PAGE for group in GROUPS]
IMAGE = 256  # tokens


class Books:
    """A scheduler over pools of a budget, and steps whose KV nobody writes."""

    def __init__(self, num_bytes: int, config: SchedulerConfig) -> None:
        sizes = text_budgets(
            GROUPS,
            PAGE_BYTES,
            num_bytes,
            page_size=PAGE,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        vision = vision_budgets(GROUPS, PAGE_BYTES, num_bytes)
        self.text = [PagePool(size // page) for size, page in zip(sizes, PAGE_BYTES, strict=True)]
        self.vision = [
            VisionIndex(size // page, PAGE) for size, page in zip(vision, PAGE_BYTES, strict=True)
        ]
        self.scheduler = Scheduler(
            config,
            groups=GROUPS,
            text=self.text,
            vision=self.vision,
            radix=RadixCache(self.text, PAGE, (False, True)),
            page_size=PAGE,
            max_model_len=1 << 20,
            in_context=True,
        )

    def decode(self, segments: tuple[Segment, ...], steps: int) -> Sequence:
        """A sequence whose prompt is computed, and so many tokens after it."""
        seq = Sequence(Request("", segments, SamplingParams()), in_context=True)
        self.scheduler.add(seq)
        while seq.num_output_tokens < steps:
            for chunk in self.scheduler.schedule().chunks:
                self.scheduler.advance(chunk)
                if chunk.samples:
                    seq.append(7)
        return seq

    def bytes_held(self, seq: Sequence) -> list[int]:
        """By group, of text and of images."""
        images = [sum(len(p.pages[g]) for p in seq.images if p.pages) for g in range(2)]
        texts = [sum(page >= 0 for page in table) for table in seq.tables]
        return [(t + i) * b for t, i, b in zip(texts, images, PAGE_BYTES, strict=True)]


@pytest.mark.parametrize("images", [0, 5])
@pytest.mark.parametrize("length", [8 << 10, 32 << 10, 128 << 10])
def test_a_hybrid_sequence_costs_what_its_layers_read(length: int, images: int) -> None:
    books = Books(8 * GIB, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=2048))
    text = (length - images * IMAGE) // (images + 1)
    segments: list[Segment] = [TextSegment((5,) * text)]
    for n in range(images):
        image = ImageInput(n.to_bytes(32, "big"), b"", IMAGE)
        segments += [ImageSegment(image), TextSegment((5,) * text)]
    seq = books.decode(tuple(segments), 40)
    layers = [len(group.layers) for group in GROUPS]
    computed = [seq.length * layers[0] * LAYER_BYTES, WINDOW * layers[1] * LAYER_BYTES]
    for held, expected in zip(books.bytes_held(seq), computed, strict=True):
        assert held == pytest.approx(expected, rel=0.05)
    everything = seq.length * sum(layers) * LAYER_BYTES
    if length == 128 << 10:
        assert sum(books.bytes_held(seq)) < everything / 6


def test_a_budget_holds_many_more_long_sequences_than_if_all_layers_kept_everything() -> None:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=2048)
    books = Books(16 * GIB, config)
    per_sequence = 32 << 10
    fits = books.text[0].num_pages * PAGE // per_sequence
    everything = 16 * GIB // (34 * LAYER_BYTES) // per_sequence
    assert (fits, everything) == (16, 3)

"""The model runner on a GPU: a `Batch` in, logits out, nothing waited for.

Owns the captured graphs, the upload of a step's tables and the scratch space. Knows nothing of
queues, text or sockets. A step's shape is the number of its rows, rounded up to a bucket, and which
kinds of work it holds; everything else is in one int32 array that is uploaded before the launch.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import sdpa_kernel

from mmserve.cache.kv_pool import KVPool
from mmserve.config import CacheConfig
from mmserve.engine.model_runner import Logits, ModelRunner
from mmserve.engine.transfer import resolve_pending, send, upload
from mmserve.kernels import work
from mmserve.kernels.attention import Scratch
from mmserve.kernels.gemv import gemv
from mmserve.kernels.launch import Launch
from mmserve.model.cuda_layer import (
    BACKENDS,
    DENSE_MULTIPLE,
    CUDALayer,
    CUDAStep,
    DenseChunk,
    rms_norm,
)
from mmserve.model.fuse import fuse
from mmserve.model.loader import LoadedModel
from mmserve.request import Sequence
from mmserve.scheduler.batch import Batch, Chunk, ImageJob

# Steps of at most so many rows are captured; longer ones hide their launches behind their work.
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)

# Deterministic steps are always of so many rows: the libraries' products choose their order of
# summation by the number of rows, and by nothing else that differs between a request's companies.
SLICE = 64
FIXED_SPLIT = work.Splits((), (256,))

MOST_SEQUENCES = 65_536  # whose tokens one step can choose


class Shape(NamedTuple):
    """What a captured launch depends on."""

    rows: int
    in_vision: bool  # an image is written, not text
    launch: Launch


@dataclass
class _Lane:
    """A sequence's page ids as an array; `source` is the list that it copies `count` of."""

    source: list[int]
    pages: Any
    count: int
    images: tuple[work.ImagePart, ...]

    def cover(self, num_pages: int) -> Any:
        """int32 [num_pages]."""
        if num_pages > len(self.pages):
            self.pages = np.concatenate([self.pages, np.zeros(num_pages, np.int32)])
        if num_pages > self.count:
            self.pages[self.count : num_pages] = self.source[self.count : num_pages]
            self.count = num_pages
        return self.pages[:num_pages]


def _slots(pages: Any, index: Any, page_size: int) -> Any:
    """Where the tokens `index` [T] of a sequence with these pages stand in its pool."""
    return pages[index // page_size] * page_size + index % page_size


class CUDARunner(ModelRunner):
    """Fuses `loaded.lm` in place. Without CUDA it runs uncaptured, in Triton's interpreter."""

    overlaps = True
    shares = True  # an image of several sequences is read once for all of them

    def __init__(
        self, loaded: LoadedModel, cache: CacheConfig, *, dtype: str, deterministic: bool = False
    ) -> None:
        """`deterministic`: a request's logits have the same bits whatever runs beside it and
        however its prompt was cut, at the price of slower prefill."""
        self._sliced = deterministic
        self._image_tokens = loaded.spec.num_image_tokens
        super().__init__(loaded, cache, dtype=dtype)

    @property
    def deterministic(self) -> bool:
        return self._sliced

    def _fuse(self) -> None:
        layers = self.lm.model.layers
        self._fused = all(CUDALayer.fits(layer) for layer in layers)
        if self._sliced and not self._fused:
            raise ValueError("deterministic needs Llama-style layers")
        if self._fused:
            for index, layer in enumerate(layers):
                layers[index] = CUDALayer(layer)
        else:
            fuse(self.lm, table=self.table, weights="dense")
        config = self.lm.config
        self._heads = config.num_attention_heads
        splits = FIXED_SPLIT if self._sliced else work.SPLITS
        self._builder = work.WorkBuilder(self._heads // config.num_key_value_heads, splits)
        self._buckets = tuple(b for b in BUCKETS if not self._sliced or b % SLICE == 0)
        self._on_gpu = self.device.type == "cuda"
        self._slots = self._ints = 0
        self._make_room(slots=8192, ints=1 << 18)
        self._previous = torch.zeros(MOST_SEQUENCES, dtype=torch.long, device=self.device)
        self._embeds = torch.zeros(
            BUCKETS[-1], config.hidden_size, dtype=self.text[0].shape.dtype, device=self.device
        )
        self._lanes: weakref.WeakKeyDictionary[Sequence, _Lane] = weakref.WeakKeyDictionary()
        self._processors = 1
        if self._on_gpu:
            # At 8 to 128 rows its choices read weights up to a tenth faster than cuBLAS's own.
            torch.backends.cuda.preferred_blas_library("cublaslt")
            self._processors = torch.cuda.get_device_properties(self.device).multi_processor_count

    @torch.inference_mode()
    def _warm_up(self, width: int) -> None:
        """Compile and capture what the first requests need: short and long contexts, chunks, both.

        Writes nothing.
        """
        if not self._on_gpu or not self._fused:
            return
        pages, long = np.zeros(80, np.int32), 641
        for count in self._buckets:
            rows = np.full((3, count), [[0], [0], [-1]], np.int32)
            for context in (1, long):
                readers = [work.Reader(row, 1, context, pages) for row in range(count)]
                self._run(readers, rows, self.text[0])
            if count > 1:
                one, rest = work.Reader(0, 1, long, pages), work.Reader(1, count - 1, long, pages)
                self._run([work.Reader(0, count, long, pages)], rows, self.text[0])
                self._run([one, rest], rows, self.text[0])
        count = self._image_tokens
        rows = np.full((3, count), [[0], [0], [-1]], np.int32)
        image = work.Reader(0, count, count, np.zeros(count, np.int32), whole=True)
        blank = torch.zeros(count, width, dtype=self.text[0].shape.dtype, device=self.device)
        self._run([image], rows, self.vision[0], blank)

    @torch.inference_mode()
    def encode(self, job: ImageJob, pixels: Tensor) -> None:
        """Encode one image, uint8 [1, 3, H, W], and write its KV.

        Each image runs alone, in the same shape always: its KV is a function of the image only,
        to the last bit, whatever else waits.
        """
        with sdpa_kernel(BACKENDS, set_priority=True):
            embeds = self.vision_model.encode(send(pixels, self.device))[0]
        count, page_size = len(embeds), self.vision[0].shape.page_size
        pages = np.asarray(job.pages[0], np.int32)
        index = np.arange(count, dtype=np.int32)
        slots = _slots(pages, index, page_size)
        reader = work.Reader(0, count, count, pages, whole=True)
        rows = np.stack([index * 0, index, slots])
        self._run([reader], rows, self.vision[0], embeds.to(self.text[0].shape.dtype))

    @torch.inference_mode()
    def run(self, batch: Batch, previous: Tensor | None = None) -> Logits | None:
        """Launch the batch's text; None when nothing is to be sampled.

        `previous` [C] int64: the tokens of the step before, when they have not landed.
        """
        if not batch.chunks:
            return None
        chunks = sorted(batch.chunks, key=lambda c: c.count > 1)
        if previous is not None:
            self._previous[: len(previous)] = previous
        if self._sliced:
            return self._run_sliced(chunks)
        rows, readers, last = self._lay_out(chunks)
        hidden = self._run(readers, rows, self.text[0])
        sampling = [i for i, c in enumerate(chunks) if c.samples]
        if not sampling:
            return None
        if sampling == list(range(len(chunks))) == last:
            picked = hidden[: len(chunks)]
        else:
            picked = hidden[upload([last[i] for i in sampling], torch.long, self.device)]
        return Logits([chunks[i] for i in sampling], self._logits(picked))

    def _run_sliced(self, chunks: list[Chunk]) -> Logits | None:
        """The same in steps of SLICE rows, one after another."""
        slices: list[list[Chunk]] = [[]]
        room = SLICE
        for chunk in chunks:
            start, end = chunk.start, chunk.start + chunk.count
            while start < end:
                count = min(end - start, room)
                samples = chunk.samples and start + count == end
                slices[-1].append(Chunk(chunk.seq, start, count, samples))
                start, room = start + count, room - count
                if not room:
                    slices.append([])
                    room = SLICE
        values = []
        for part in filter(None, slices):
            rows, readers, last = self._lay_out(part)
            hidden = self._run(readers, rows, self.text[0])
            picked = [row for row, chunk in zip(last, part, strict=True) if chunk.samples]
            if picked:
                index = upload(picked, torch.long, self.device)
                values.append(self._logits(hidden)[index])
        sampling = [chunk for chunk in chunks if chunk.samples]
        return Logits(sampling, torch.cat(values)) if sampling else None

    def _lay_out(self, chunks: list[Chunk]) -> tuple[Any, list[work.Reader], list[int]]:
        """Token ids, positions and slots [3, T], who reads what, and each chunk's last row."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        readers, last = [], []
        size = self.text[0].shape.page_size
        for chunk in chunks:
            seq, start, end = chunk.seq, chunk.start, chunk.start + chunk.count
            lane = self._lane(seq)
            pages = lane.cover(-(-end // size))
            readers.append(work.Reader(len(ids), chunk.count, start + 1, pages, lane.images))
            if chunk.count == 1:
                ids.append(seq.token_ids[start])
                positions.append(seq.position(start))
                slots.append(seq.tables[0][start // size] * size + start % size)
            else:
                ids += seq.token_ids[start:end]
                index = np.arange(start, end)
                shift = np.zeros_like(index)
                for image in lane.images:
                    shift += np.where(index >= image.threshold, image.num_tokens, 0)
                positions += (index + shift).tolist()
                slots += _slots(pages, index, size).tolist()
            last.append(len(ids) - 1)
        return np.array([ids, positions, slots], np.int32), readers, last

    def _lane(self, seq: Sequence) -> _Lane:
        lane = self._lanes.get(seq)
        if lane is None or lane.source is not seq.tables[0]:
            images = tuple(
                work.ImagePart(
                    p.key,
                    np.asarray((p.pages or [])[0], np.int32),
                    p.image.num_tokens,
                    p.base,
                    p.text_index,
                )
                for p in seq.images
            )
            lane = self._lanes[seq] = _Lane(seq.tables[0], np.zeros(64, np.int32), 0, images)
        return lane

    # -- launching ------------------------------------------------------------------------------

    def _run(
        self, readers: list[work.Reader], rows: Any, own: KVPool, embeds: Tensor | None = None
    ) -> Tensor:
        """The normed hidden states [>= T, hidden] of a step; `embeds` in place of token ids."""
        count = rows.shape[1]
        captured = self._on_gpu and self._fused and count <= BUCKETS[-1]
        bucket = count
        if captured:
            bucket = next(b for b in self._buckets if b >= count)
        elif self._sliced and self._fused:
            bucket = -(-count // SLICE) * SLICE
        padded = np.zeros((3, bucket), np.int32)
        padded[2] = -1
        padded[:, :count] = rows
        alone = [] if captured else [r for r in readers if self._reads_itself(r)]
        paged = [r for r in readers if not self._reads_itself(r)] if alone else readers
        tables = self._builder.build(
            paged, bucket, rows=padded, share=self.shares, long=not captured
        )
        self._make_room(tables.num_slots, len(tables.array))
        self._upload(tables.array)
        launch = Launch.of(
            tables, own.shape.num_kv_heads, self._processors, deterministic=self._sliced
        )
        shape = Shape(bucket, own is self.vision[0], launch)
        if embeds is not None and not captured:
            embeds = functional.pad(embeds, (0, 0, 0, bucket - count))
        if not captured:
            return self._compute(shape, embeds, tuple(self._dense(r, rows[2]) for r in alone))
        if embeds is not None:
            self._embeds[:count] = embeds
        if shape not in self._graphs:
            self._graphs[shape] = self._capture(shape)
        graph, hidden = self._graphs[shape]
        graph.replay()
        return hidden

    def _make_room(self, slots: int, ints: int) -> None:
        """Scratch for so many partial results and tables of so many numbers, or more.

        What was captured before is gone with the place it used.
        """
        if slots <= self._slots and ints <= self._ints:
            return
        if self._on_gpu:
            torch.cuda.synchronize()
            # Memory of all graphs together: only one runs at a time. Its handle dies with them.
            self._memory = torch.cuda.graph_pool_handle()
        self._slots, self._ints = max(slots, 2 * self._slots), max(ints, 2 * self._ints)
        dim = self.text[0].shape.head_dim
        self._graphs: dict[Shape, tuple[Any, Tensor]] = {}
        self._scratch = Scratch(self._slots, self._heads, dim, self.device)
        self._work = torch.zeros(self._ints, dtype=torch.int32, device=self.device)

    def _reads_itself(self, reader: work.Reader) -> bool:
        """Whether a library's causal attention over the chunk alone is all it takes."""
        alone = reader.hi == 1 and not reader.images and not reader.whole
        alone = alone and not self._sliced
        return alone and reader.count > BUCKETS[-1] and self.text[0].shape.dtype.itemsize == 2

    def _dense(self, reader: work.Reader, slots: Any) -> DenseChunk:
        first, count = reader.first_row, reader.count
        padded = np.zeros(-(-count // DENSE_MULTIPLE) * DENSE_MULTIPLE, np.int64)
        padded[:count] = slots[first : first + count]
        return DenseChunk(first, count, send(torch.from_numpy(padded), self.device))

    def _upload(self, array: Any) -> None:
        tables = torch.from_numpy(array)
        # The allocator of pinned memory keeps the copy's source until the stream has read it.
        staged = tables.pin_memory() if self._on_gpu else tables
        self._work[: len(array)].copy_(staged, non_blocking=True)

    def _capture(self, shape: Shape) -> tuple[Any, Tensor]:
        embeds = self._embeds[: shape.rows] if shape.in_vision else None
        self._compute(shape, embeds)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            hidden = self._compute(shape, embeds)
        return graph, hidden

    def _compute(
        self, shape: Shape, embeds: Tensor | None, dense: tuple[DenseChunk, ...] = ()
    ) -> Tensor:
        """Everything between the tables and the hidden states, from device memory alone."""
        rows = shape.rows
        ids, positions, slots = self._work[work.HEADER : work.HEADER + 3 * rows].view(3, rows)
        own = self.vision[0] if shape.in_vision else self.text[0]
        step = CUDAStep(
            work=self._work,
            positions=positions,
            slots=slots,
            rope=self.table,
            scratch=self._scratch,
            launch=shape.launch,
            own=own,
            vision=self.vision[0],
            dense=dense,
        )
        if embeds is None:
            wanted = ids.long()
            known = resolve_pending(wanted, self._previous)
            embeds = self.lm.get_input_embeddings()(known)
        if not self._fused:
            return self._forward(embeds[None], positions.long()[None], step)[0]
        x = embeds[None].clone()
        for layer in self.lm.model.layers:
            x = layer(x, step=step)
        norm = self.lm.model.norm
        return rms_norm(x[0], norm.weight, float(norm.variance_epsilon))

    def _logits(self, hidden: Tensor) -> Tensor:
        head = self.lm.lm_head
        if len(hidden) > 1 or head.bias is not None or not self._fused:
            out: Tensor = head(hidden)
            return out
        out = hidden.new_empty(1, len(head.weight))
        gemv(hidden, head.weight, out)
        return out

"""The model runner on a GPU: a `Batch` in, logits out, nothing waited for.

Owns the upload of a step's tables, the scratch space, and what is captured. Knows nothing of
queues, text or sockets. A step's shape is the number of its rows, rounded up to a bucket, and which
kinds of work it holds; everything else is in one int32 array that is uploaded before the launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mmserve.config import CacheConfig, ModelConfig, SchedulerConfig
from mmserve.engine.cuda_layout import GROWN, CUDALayout, Layout, slices
from mmserve.engine.dense_chunks import dense_chunk, reads_itself
from mmserve.engine.feature_cache import Done
from mmserve.engine.graphs import URGENT, Graphs
from mmserve.engine.model_runner import Logits, ModelRunner
from mmserve.engine.plan import StepInput, chosen_rows
from mmserve.engine.rehearsal import Rehearsal
from mmserve.engine.team import Team, followed
from mmserve.engine.transfer import Staging, resolve_pending, send, upload
from mmserve.engine.vision_stream import CapturedTower, VisionStream
from mmserve.kernels import work
from mmserve.kernels.attention import Scratch
from mmserve.kernels.fused import Turns
from mmserve.kernels.graft import graft
from mmserve.kernels.launch import Launch
from mmserve.kernels.reference import NOWHERE
from mmserve.kernels.work_builder import WorkBuilder
from mmserve.model import cuda_install
from mmserve.model.adapter import Features
from mmserve.model.cuda_prelude import CUDAEmbedding
from mmserve.model.cuda_step import CUDAStep, DenseChunk
from mmserve.model.cuda_tower import fuse_towers
from mmserve.model.fuse import fuse
from mmserve.model.weights import Loaded
from mmserve.request import ImageInput
from mmserve.scheduler.batch import Batch, Chunk, ImageJob
from mmserve.spec.draft import MOST_TOKENS
from mmserve.spec.drafter import FINAL

# Steps of at most so many rows are captured; longer ones hide their launches behind their work.
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)

# Deterministic steps are always of so many rows: the libraries' products choose their order of
# summation by the number of rows, and by nothing else that differs between a request's companies.
SLICE = 64
FIXED_SPLIT = work.Splits((), (256,))

MOST_GROWN = 64  # sequences whose drafts only the device has seen


class Shape(NamedTuple):
    """What a captured launch depends on."""

    rows: int
    embedded: bool  # rows come as embeddings, not as token ids
    crosses: bool  # some row looks at an image beside the text
    launch: Launch
    apart: bool  # pages of text that the step fills are stored while it reads


class CUDARunner(ModelRunner):
    """Fuses `loaded.lm` in place. Without CUDA it runs uncaptured, in Triton's interpreter."""

    overlaps = True
    sees_beside = True
    shares = True  # an image of several sequences is read once for all of them

    def __init__(
        self,
        loaded: Loaded,
        cache: CacheConfig,
        model: ModelConfig,
        steps: SchedulerConfig | None = None,
        team: Team | None = None,
    ) -> None:
        """`model.deterministic`: a request's logits have the same bits whatever runs beside it and
        however its prompt was cut, at the price of slower prefill."""
        self._sliced = model.deterministic
        spec = getattr(loaded, "spec", None)
        # Of each image that is encoded by itself, in its one shape.
        self._image_tokens = spec.num_image_tokens if spec else 0
        self._image_size = spec.image_size if spec else 0
        super().__init__(loaded, cache, model, steps, team)

    @property
    def deterministic(self) -> bool:
        return self._sliced

    def _fuse(self) -> None:
        self._fused = cuda_install.install(self.adapter, bare=not self.stock)
        self._rows_of = CUDAEmbedding.of(self.adapter)
        if self._sliced and not self._fused:
            raise ValueError("deterministic needs layers of a kind that is fused")
        shows = not self.stock or hasattr(self.adapter.model.config, "vision_config")
        if self._sliced and self.in_context and shows:
            raise ValueError("deterministic needs images that are computed by themselves")
        capped = any(of.softcap is not None for of in self.adapter.layers.values())
        half = self.adapter.dtype.itemsize == 2  # what the library is quicker at than our kernels
        self._reads_densely = self._fused and not self._sliced and not capped and half
        self._reads_densely = self._reads_densely and not self.num_open
        if not self._fused and not self.stock:
            fuse(self.lm, table=self.table, weights="dense")
        fuse_towers(self.adapter.model if self.stock else self.vision_model)
        scaled = self.stock and self.regimes.trained is not None
        self._layout = CUDALayout(self._planner, scaled=scaled)
        each = [self.adapter.layers[group.layers[0]] for group in self.groups]
        splits = FIXED_SPLIT if self._sliced else work.SPLITS
        self._heads, self._dim = max(of.heads for of in each), max(of.head_dim for of in each)
        self._kv_heads = max(of.kv_heads for of in each)
        self._buckets = tuple(b for b in BUCKETS if not self._sliced or b % SLICE == 0)
        self._on_gpu = self.device.type == "cuda"
        self._graphs = Graphs(
            self.device,
            "steps of this model",
            must=self._fused,  # transformers' own layers may do what cannot be captured
            priority=URGENT,
        )
        self._beside = VisionStream(self.device)
        self._tower = CapturedTower(self.vision_model, self.device, self.adapter.dtype)
        self._staging = Staging(self.device)
        self._slots = self._ints = 0
        self._make_room(slots=8192, ints=1 << 18)
        self._previous = torch.zeros(-1 - GROWN, dtype=torch.long, device=self.device)
        if self._layout.takes_grown and not self._sliced and self.team.ranks == 1:
            room = MOST_GROWN * MOST_TOKENS
            self.grown = torch.zeros(4, room, dtype=torch.int32, device=self.device)
        self._embeds = torch.zeros(
            *(BUCKETS[-1], self.adapter.hidden_size), dtype=self.adapter.dtype, device=self.device
        )
        self._processors = 1
        if self._on_gpu:
            # At 8 to 128 rows its choices read weights up to a tenth faster than cuBLAS's own.
            torch.backends.cuda.preferred_blas_library("cublaslt")
            self._processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._builders = [
            WorkBuilder(of.heads // of.kv_heads, splits, abreast=self._processors // of.kv_heads)
            for of in each
        ]

    @torch.inference_mode()
    def _warm_up(self, width: int) -> None:
        if not self._graphs.enabled:
            return
        rehearsal = Rehearsal(self._layout, self._run)
        rehearsal.steps(self._buckets)
        if count := self._image_tokens:
            held = [[0] * -(-count // self.text[0].shape.page_size) for _ in self.groups]
            image = self._layout.image(b"", held, count)
            blank = torch.zeros(count, width, dtype=self.adapter.dtype, device=self.device)
            rehearsal.blank(count, *image.readers[0], embeds=blank)
        self.rehearse_look()

    @torch.inference_mode()
    def rehearse_look(self) -> None:
        if size := self._image_size:
            pixels = torch.zeros(1, 3, size, size, dtype=torch.uint8)
            self._beside.start(lambda: Features(self._tower(pixels)))

    @torch.inference_mode()
    def listen(self, layers: Sequence[int], *, trees: bool = False) -> None:
        super().listen(layers)
        if any(layer != FINAL for layer in layers):
            self._forget_graphs()
            self._warm_up(self.adapter.hidden_size)
        if self._graphs.enabled:
            Rehearsal(self._layout, self._run).drafts(self._buckets, trees=trees)

    # -- images ---------------------------------------------------------------------------------

    def _start(self, look: Callable[[], Features]) -> tuple[Features, Done]:
        return self._beside.start(look)

    def _look(self, image: ImageInput, pixels: Any) -> Features:
        if not self.stock:
            return Features(self._tower(pixels)[: image.num_tokens])
        tensors = {k: send(v, self.device) for k, v in pixels.items() if isinstance(v, Tensor)}
        return super()._look(image, {**pixels, **tensors})

    @torch.inference_mode()
    def look(self, image: ImageInput, pixels: Any) -> Features:
        look = super().look
        return self._beside.finish(lambda: look(image, pixels))

    @torch.inference_mode()
    def encode(self, job: ImageJob) -> None:
        if self.adapter.cross is not None:
            return super().encode(job)
        image = job.image.whole
        features = self._features.get(image.digest)
        count = len(features.embeds)
        where: dict[str, Any] = {"regime": job.regime, "positions": image.positions}
        layout = self._layout.image(job.key, job.pages, count, **where)
        self._run(layout, features.embeds, self.adapter.extras([(0, features)], count))

    @torch.inference_mode()
    def run(self, batch: Batch, previous: Tensor | None = None) -> Logits | None:
        """Launch the batch's text and its images in context; None when nothing is to be sampled.

        `previous` [C] int64: the tokens of the step before, when they have not landed.
        """
        if not batch.chunks:
            return None
        self.heard = {}
        chunks = sorted(batch.chunks, key=lambda c: c.num_rows > 1)
        if previous is not None:
            self._take(previous)
        if self._sliced:
            return self._run_sliced(chunks)
        hidden, last = self._run_chunks(chunks)
        rows = chosen_rows(chunks, last)
        if not rows:
            return None
        if rows == list(range(len(rows))):
            picked = hidden[: len(rows)]
        else:
            picked = hidden[upload(rows, torch.long, self.device)]
        return Logits([c for c in chunks if c.samples], self._logits(picked))

    def _run_sliced(self, chunks: list[Chunk]) -> Logits | None:
        """The same in steps of SLICE rows, one after another."""
        values = []
        for part in slices(chunks, SLICE):
            hidden, last = self._run_chunks(part)
            picked = chosen_rows(part, last)
            if picked:
                index = upload(picked, torch.long, self.device)
                values.append(self._logits(hidden)[index])
        sampling = [chunk for chunk in chunks if chunk.samples]
        return Logits(sampling, torch.cat(values)) if sampling else None

    def _run_chunks(self, chunks: list[Chunk]) -> tuple[Tensor, list[int]]:
        """Normed hidden states [>= T, hidden], and the row of each chunk's last token."""
        layout = self._layout.step(chunks)
        embeds, extra = self._embed_rows(layout, chunks) if layout.images else (None, None)
        joined = self._run(layout, embeds, extra)
        if self.hears:
            self._taps.hear(self.heard, joined, zip(chunks, layout.last, strict=True))
        return self._taps.hidden(joined), layout.last

    def _embed_rows(self, layout: Layout, chunks: list[Chunk]) -> tuple[Tensor, dict[str, Any]]:
        """Embeddings [T, hidden] of rows of which some are images', and what else the decoder is
        told."""
        ids = send(torch.from_numpy(layout.rows[0].astype(np.int64)), self.device)
        if self.grown is not None:
            known = self.grown[0][(GROWN - ids).clamp_(min=0)].long()
            ids = torch.where(ids <= GROWN, known, ids)
        ids = resolve_pending(ids, self._previous)
        none = torch.zeros(0, dtype=torch.long, device=self.device)
        return self._embed(StepInput(ids, none, None, chunks, [], (), layout.images))

    # -- launching ------------------------------------------------------------------------------

    def _run(
        self, layout: Layout, embeds: Tensor | None = None, extra: dict[str, Any] | None = None
    ) -> Tensor:
        """The normed hidden states [>= T, hidden] of a step; `embeds` in place of token ids."""
        return self._launch(layout._replace(last=[], images=[]), embeds, extra)

    @followed
    def _launch(
        self, layout: Layout, embeds: Tensor | None, extra: dict[str, Any] | None
    ) -> Tensor:
        """Of a layout without its chunks, which nothing here asks for."""
        rows, count = layout.rows, layout.rows.shape[1]
        crosses = self.adapter.cross is not None and _mark_lookers(layout)
        captured = self._graphs.enabled and count <= BUCKETS[-1] and not extra
        bucket = count
        if captured:
            bucket = next(b for b in self._buckets if b >= count)
        elif self._sliced:
            bucket = -(-count // SLICE) * SLICE
        padded = self._layout.blank(bucket)
        padded[:, :count] = rows
        dense: list[tuple[DenseChunk, ...]] = []
        sets: list[work.WorkTables] = []
        at = work.HEADER * len(self.groups) + padded.size
        for number, (builder, readers) in enumerate(
            zip(self._builders, layout.readers, strict=True)
        ):
            slots, paged, alone = rows[number - len(self.groups)], readers, list[DenseChunk]()
            if not captured:
                itself = [self._reads_densely and reads_itself(r, slots) for r in readers]
                which = list(zip(readers, itself, strict=True))
                alone = [dense_chunk(r, slots, self.device) for r, dense in which if dense]
                paged = [r for r, dense in which if not dense]
            dense.append(tuple(alone))
            how: dict[str, Any] = {"at": at, "share": self.shares, "long": not captured}
            sets.append(builder.build(paged, bucket, **how))
            at += len(sets[-1].body)
        self._make_room(max(s.num_slots for s in sets), at)
        self._upload(work.join(sets, padded))
        launch = Launch.of(sets, self._kv_heads, self._processors, deterministic=self._sliced)
        apart = layout.apart and self.num_open > 0
        shape = Shape(bucket, embeds is not None, crosses, launch, apart)
        if not captured:
            if embeds is not None:
                embeds = functional.pad(embeds, (0, 0, 0, bucket - count))
            return self._compute(shape, embeds, tuple(dense), extra)
        if embeds is not None:
            self._embeds[:count] = embeds
        fixed = None if embeds is None else self._embeds[:bucket]
        return self._graphs.run(shape, lambda: self._compute(shape, fixed))

    @followed
    def _take(self, previous: Tensor) -> None:
        self._previous[: len(previous)] = previous

    @followed
    def _forget_graphs(self) -> None:
        self._graphs.clear()

    def _make_room(self, slots: int, ints: int) -> None:
        """Scratch for so many partial results and tables of so many numbers, or more.

        What was captured before is gone with the place it used.
        """
        if slots <= self._slots and ints <= self._ints:
            return
        self._graphs.clear()
        self._slots, self._ints = max(slots, 2 * self._slots), max(ints, 2 * self._ints)
        self._scratch = Scratch(self._slots, self._heads, self._dim, self.device)
        self._work = torch.zeros(self._ints, dtype=torch.int32, device=self.device)

    def _upload(self, array: Any) -> None:
        self._staging.copy(array, self._work[: len(array)])

    def _compute(
        self,
        shape: Shape,
        embeds: Tensor | None,
        dense: tuple[tuple[DenseChunk, ...], ...] = (),
        extra: dict[str, Any] | None = None,
    ) -> Tensor:
        """Everything between the tables and the hidden states, from device memory alone."""
        lines, first = self._layout.num_lines, work.HEADER * len(self.groups)
        rows = self._work[first : first + lines * shape.rows].view(lines, shape.rows)
        if shape.launch.trees and self.grown is not None:
            of: dict[str, Any] = {"axes": self._layout.axes, "sets": len(self.groups)}
            graft(self._work, rows, self.grown, GROWN, **of)
        ids, positions, slots = rows[0], rows[1:][: self._layout.axes], rows[-len(self.groups) :]
        step = CUDAStep(
            work=self._work,
            slots=slots,
            rope=self.table,
            turns=None if self.stock else Turns.by_table(self.table, positions[0]),
            scratch=self._scratch,
            launch=shape.launch,
            text=self.text,
            vision=self.vision,
            places=self._places,
            dense=dense,
            lone=shape.rows == 1 and embeds is None and not shape.launch.large,
            filled=rows[-2 * len(self.groups) :] if self.num_open else None,
            apart=shape.apart,
        )
        if embeds is not None:
            embeds = embeds.clone()  # layers write into what they are given
        elif self._rows_of is not None:
            embeds = self._rows_of(ids, self._previous)
        else:
            embeds = self.adapter.embed(resolve_pending(ids.long(), self._previous))
        if self.stock or not self._fused:
            where = positions.long() if len(positions) > 1 else positions[0].long()
            regimes = rows[1 + self._layout.axes].long() if self._layout.scaled else None
            told = extra or {}
            if shape.crosses and self.adapter.cross is not None:
                told = self.adapter.cross.arguments(slots[-1] != NOWHERE)
            return self._taps.join(self.adapter.decode(embeds, where, step, regimes, **told))
        x = embeds[None]
        for layer in self.adapter.decoder.layers:
            x = layer(x, step=step)
        return self._taps.join(self.adapter.decoder.norm(x)[0])

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.stock:
            return self.adapter.logits(hidden)
        out: Tensor = self.lm.lm_head(hidden)
        return out


def _mark_lookers(layout: Layout) -> bool:
    """Whether any row looks at an image beside the text. Those that do get a slot in the group of
    the layers that look, which store nothing: so the device is told who they are."""
    slots = layout.rows[-1]
    for reader in layout.readers[-1]:
        _, _, visual_lo, visual_hi = reader.matrix
        slots[reader.first_row :][: reader.num_queries][visual_lo < visual_hi] = 0
    return bool((slots != NOWHERE).any())

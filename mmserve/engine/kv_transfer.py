"""Between an engine's pools and KV files: what is cached goes out, what fits comes in.

Owns whose KV an engine's is, what is worth most, and the copying of pages. Everything runs on the
engine's thread. Knows nothing of the file's words or how it is checked.

What comes in takes free pages only: nothing that is stored or in use gives way to it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from mmserve.cache.kv_pool import KVShape, TextKVPool, VisionKVPool
from mmserve.cache.radix_cache import RadixCache
from mmserve.cache.radix_node import HOLE, RadixNode
from mmserve.cache.vision_index import VisionEntry
from mmserve.engine.border import Pipeline
from mmserve.engine.model_runner import ModelRunner
from mmserve.engine.page_copy import gather, scatter
from mmserve.kvfile.file import KVFile, read_file
from mmserve.kvfile.header import (
    Group,
    Identity,
    KVHeader,
    StoredImage,
    TextRun,
    image_name,
    text_name,
)
from mmserve.model.loader import LoadedModel
from mmserve.model.weights import Loaded
from mmserve.tokenizer import Tokenizer
from mmserve.vision.preprocess import DECODING, FULL_DECODING, fingerprint


def identity_of(
    loaded: Loaded, runner: ModelRunner, tokenizer: Tokenizer, pipeline: Pipeline
) -> Identity:
    """Whose KV an engine's is."""
    described = loaded.spec if isinstance(loaded, LoadedModel) else loaded.checkpoint
    mode = runner.mode
    groups = tuple(
        Group(
            layers=group.layers,
            window=group.window,
            text=group.text,
            images=group.images,
            kv_heads=pool.shape.num_kv_heads,
            head_dim=pool.shape.head_dim,
            text_format=pool.shape.kind.name,
            image_format=images.shape.kind.name,
            text_tile=_tile(pool.shape),
            image_tile=_tile(images.shape),
        )
        for group, pool, images in zip(runner.groups, runner.text, runner.vision, strict=True)
    )
    return Identity(
        architecture=runner.adapter.model.config.model_type,
        weights=described.weights_id.hex(),
        weights_dtype=runner.dtype,
        tokenizer=tokenizer.fingerprint,
        processor=_processor(pipeline),
        vision_mode=mode.name if mode.head is None else f"{mode.name} {mode.head}",
        rope=_rope(loaded, runner),
        page_size=runner.text[0].shape.page_size,
        dtype=str(runner.text[0].shape.dtype).removeprefix("torch."),
        groups=groups,
    )


def _tile(shape: KVShape) -> int | None:
    return None if shape.kind.plain else shape.tile[0]


def _processor(pipeline: Pipeline) -> str:
    """What all images' keys contain beside their files; empty where there are none."""
    if not pipeline.settings_id:
        return ""
    decoding = DECODING + FULL_DECODING
    return fingerprint(("decoding", decoding), ("settings", pipeline.settings_id)).hex()


def _rope(loaded: Loaded, runner: ModelRunner) -> dict[str, Any]:
    """What keys are rotated by, as JSON has it."""
    regimes = runner.regimes
    words = {
        "parameters": getattr(runner.adapter.config, "rope_parameters", None),
        "scaling": loaded.rope_scaling,
        "trained": regimes.trained,
        "growth": regimes.growth.value,
        "whole": regimes.whole,
        "turns_images": regimes.turns_images,
    }
    made: dict[str, Any] = json.loads(json.dumps(words, default=dict))
    return made


class Part(NamedTuple):
    """Of a file: what came in, what was there before, what found no room. Tokens and images."""

    new: int = 0
    known: int = 0
    left_out: int = 0


class Placed(NamedTuple):
    text: Part  # tokens
    images: Part


class KVTransfer:
    """`text`, `vision`: the pools by layer group; `radix`: of the groups that have text, None
    where prefixes are not cached; `compatible`: as `Identity.require` has it."""

    def __init__(
        self,
        identity: Identity,
        *,
        text: Sequence[TextKVPool],
        vision: Sequence[VisionKVPool],
        radix: RadixCache | None,
        compatible: Collection[str] = (),
    ) -> None:
        self.identity, self._compatible = identity, frozenset(compatible)
        self._text, self._vision, self._radix = text, vision, radix
        self._text_groups = [g for g, group in enumerate(identity.groups) if group.text]
        self._image_groups = [g for g, group in enumerate(identity.groups) if group.images]

    # -- out ------------------------------------------------------------------------------------

    def collect(self) -> KVFile:
        """All that is cached, copied to the host; the last used first."""
        tensors: dict[str, Tensor] = {}
        runs, images = [], []
        for n, (run, pages) in enumerate(self._stored_runs()):
            runs.append(run)
            for g, held in zip(self._text_groups, pages, strict=True):
                if held:
                    tensors[text_name(n, g)] = gather(self._text[g], held).cpu()
        for n, (key, entries) in enumerate(self._stored_images().items()):
            count = next(iter(entries.values())).num_tokens
            images.append(StoredImage(key, count, tuple(entries)))
            for g, entry in entries.items():
                tensors[image_name(n, g)] = gather(self._vision[g], entry.pages).cpu()
        return KVFile(KVHeader(self.identity, tuple(runs), tuple(images)), tensors)

    def _stored_runs(self) -> Iterator[tuple[TextRun, list[list[int]]]]:
        """Each with its pages in the pools, by group with text."""
        nodes = list(self._radix.nodes()) if self._radix else []
        # A node was used when its children were, and the order is stable: parents stay first.
        nodes.sort(key=lambda node: -node.last_used)
        numbers = {id(node): n for n, node in enumerate(nodes)}
        for node in nodes:
            parent = numbers.get(id(node.parent))
            yield self._run(node, parent), list(map(_held, node.pages))

    def _run(self, node: RadixNode, parent: int | None) -> TextRun:
        tokens, marks = [], []
        for index, key in enumerate(node.keys):
            *names, token = key if isinstance(key, tuple) else (key,)
            tokens.append(token)
            if names:
                marks.append((index, tuple(names)))
        pages: list[tuple[int, ...]] = [() for _ in self.identity.groups]
        for g, part in zip(self._text_groups, node.pages, strict=True):
            pages[g] = tuple(i for i, page in enumerate(part) if page != HOLE)
        return TextRun(parent, tuple(tokens), tuple(marks), tuple(pages))

    def _stored_images(self) -> dict[bytes, dict[int, VisionEntry]]:
        found: dict[bytes, dict[int, VisionEntry]] = {}
        for g in self._image_groups:
            for key, entry in self._vision[g].index.stored():
                found.setdefault(key, {})[g] = entry
        return found

    # -- in -------------------------------------------------------------------------------------

    def read(self, path: Path) -> KVFile:
        """A file of this identity, or of one declared compatible. Raises `KVFileError` or
        `OSError`."""
        return read_file(path, self.identity, self._compatible)

    def put(self, file: KVFile) -> Placed:
        """Make such a file findable, as much of it as free pages hold; of other weights' KV, text
        in front of which no image stands: images of theirs are known by other names."""
        self.identity.require(file.header.identity, self._compatible)
        images = Part(left_out=len(file.header.images))
        if not self.is_foreign(file.header):
            images = self._put_images(file)
        return Placed(self._put_texts(file), images)

    def is_foreign(self, header: KVHeader) -> bool:
        """Whether other weights computed it."""
        return header.identity.weights != self.identity.weights

    def _put_images(self, file: KVFile) -> Part:
        room = [pool.index.num_free for pool in self._vision]
        chosen, known, left_out = [], 0, 0
        for n, image in enumerate(file.header.images):
            groups = [g for g in image.groups if not self._vision[g].index.lookup(image.key)]
            pages = file.header.image_pages(image)
            if not groups:
                known += 1
            elif any(room[g] < pages for g in groups):
                left_out += 1
            else:
                chosen.append((n, image, groups))
                for g in groups:
                    room[g] -= pages
        for n, image, groups in reversed(chosen):  # the most useful one is then the last used
            for g in groups:
                self._put_image(image, self._vision[g], file.tensors[image_name(n, g)])
        return Part(len(chosen), known, left_out)

    def _put_image(self, image: StoredImage, pool: VisionKVPool, tensor: Tensor) -> None:
        pages = pool.index.reserve(image.key, image.num_tokens)
        try:
            scatter(pool, pages, tensor)
            pool.index.mark_ready(image.key)
        finally:
            pool.index.release(image.key)  # unwritten, it is forgotten

    def _put_texts(self, file: KVFile) -> Part:
        runs = file.header.runs
        if self._radix is None:
            return Part(left_out=file.header.num_text_tokens)
        taken: dict[int, list[list[int]]] = {}  # by run: pages by group with text
        known: set[int] = set()
        try:
            for n, run in enumerate(runs):
                if run.parent is not None and run.parent not in taken:
                    continue
                if run.marks and self.is_foreign(file.header):
                    continue
                new_below = run.parent is not None and run.parent not in known
                pages = None if new_below else self._find(runs, n)
                if pages is not None:
                    known.add(n)
                    taken[n] = pages
                elif self._has_room(run):
                    taken[n] = self._allocate(run)
                    self._fill(file, n, taken[n])
            parents = {runs[n].parent for n in taken}
            for n in sorted(taken.keys() - known - parents, reverse=True):
                self._insert(runs, n, taken)
        finally:
            for n in taken.keys() - known:
                self._release(taken[n])
        sizes = [len(run.tokens) for run in runs]
        new = sum(sizes[n] for n in taken.keys() - known)
        found = sum(sizes[n] for n in known)
        return Part(new, found, sum(sizes) - new - found)

    def _find(self, runs: Sequence[TextRun], number: int) -> list[list[int]] | None:
        """A run's pages by group with text, if its whole prefix is cached already."""
        assert self._radix is not None
        keys = [key for n in _path(runs, number) for key in runs[n].keys]
        matched = self._radix.match([*keys, None], limit=len(keys))
        if matched.num_tokens < len(keys):
            return None
        own = len(runs[number].tokens) // self.identity.page_size
        return [pages[-own:] for pages in matched.pages]

    def _has_room(self, run: TextRun) -> bool:
        return all(len(run.pages[g]) <= self._text[g].pages.num_free for g in self._text_groups)

    def _allocate(self, run: TextRun) -> list[list[int]]:
        """New pages of a run by group with text, HOLE where the file has none."""
        num_pages = len(run.tokens) // self.identity.page_size
        made = [[HOLE] * num_pages for _ in self._text_groups]
        for g, pages in zip(self._text_groups, made, strict=True):
            new = self._text[g].pages.allocate(len(run.pages[g]))
            for place, page in zip(run.pages[g], new, strict=True):
                pages[place] = page
        return made

    def _fill(self, file: KVFile, number: int, pages: list[list[int]]) -> None:
        for g, part in zip(self._text_groups, pages, strict=True):
            if held := _held(part):
                scatter(self._text[g], held, file.tensors[text_name(number, g)])

    def _insert(
        self, runs: Sequence[TextRun], leaf: int, taken: dict[int, list[list[int]]]
    ) -> None:
        """Make a run and those before it findable; what is stored already stays as it is."""
        assert self._radix is not None
        path = _path(runs, leaf)
        keys: list[Hashable] = [key for n in path for key in runs[n].keys]
        groups = range(len(self._text_groups))
        self._radix.insert(keys, [[p for n in path for p in taken[n][g]] for g in groups])

    def _release(self, pages: list[list[int]]) -> None:
        for g, part in zip(self._text_groups, pages, strict=True):
            self._text[g].pages.release(_held(part))


def _path(runs: Sequence[TextRun], number: int) -> list[int]:
    """The runs from the start down to this one."""
    path, step = [], number
    while True:
        path.append(step)
        parent = runs[step].parent
        if parent is None:
            return path[::-1]
        step = parent


def _held(pages: Iterable[int]) -> list[int]:
    return [page for page in pages if page != HOLE]

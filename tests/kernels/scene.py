"""Random attention scenes: pools and a plan as the kernels take them, and what must come out.

The answer is worked out in float64, query by query, from unrotated queries and keys and the plain
rule of who sees whom; nothing of the kernels' arithmetic is used but the order of a head's halves.
Keys and values are those that the pools' formats give back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

from mmserve.kernels import kv_formats
from mmserve.kernels.kv_formats import GROUP_TOKENS, PLAIN, KVFormat
from mmserve.kernels.reference import AttentionPlan, QueryGroup, read_pages, rotate, write_kv

THETA = 10_000.0

Key = tuple[int, Tensor, Tensor]  # position, unrotated key and value [Hkv, D]


@dataclass(frozen=True)
class Row:
    """One sequence: `length` text tokens and images (text index before which each stands, tokens).

    Its queries are the last ones. `whole`: every query reads the whole text. `reads`: text [lo, hi)
    and visual [lo, hi) of each query, where it is not simply what stands before it. `sink_tokens`:
    so many of the first text tokens are read, too. `names`: images of one name are the same.
    `masks`: of each query, who is read of the text tokens behind hi.
    """

    length: int
    images: tuple[tuple[int, int], ...] = ()
    whole: bool = False
    reads: tuple[tuple[int, int, int, int], ...] = ()
    sink_tokens: int = 0
    names: tuple[int, ...] = ()
    masks: tuple[int, ...] = ()

    @classmethod
    def draft(
        cls,
        known: int,
        parents: Sequence[int],
        images: tuple[tuple[int, int], ...] = (),
        window: int = 1_000_000,
    ) -> Row:
        """The last of `known` text tokens and a tree behind it, number i following number
        parents[i] or, where that is -1, the last known token. `window`: text tokens that are read
        of what is known and of the path together."""
        paths: list[list[int]] = [[]]
        for number, parent in enumerate(parents):
            paths.append([*paths[parent + 1], number])
        lows = [min(max(known + len(path) - window, 0), known) for path in paths]
        visual = sum(n for _, n in images)
        return cls(
            known + len(parents),
            images,
            reads=tuple((lo, known, 0, visual) for lo in lows),
            masks=tuple(sum(1 << j for j in path[-window:]) for path in paths),
        )

    def read_by(self, text_index: int, query: int) -> tuple[int, int, int, int]:
        if self.reads:
            return self.reads[query]
        hi = self.length if self.whole else text_index + 1
        return 0, hi, 0, sum(n for at, n in self.images if at <= text_index)


@dataclass(frozen=True)
class Shape:
    """`in_context`: images' keys are rotated as the sequence counts. `origin`: the position of a
    sequence's first token. `learned`: heads have learned sinks. `kinds`: formats of text and
    vision; pages that are stored as a whole have as many tokens as they are to have."""

    kv_heads: int = 2
    group: int = 3
    dim: int = 16
    page: int = 16
    in_context: bool = False
    origin: int = 0
    softcap: float | None = None
    learned: bool = False
    kinds: tuple[KVFormat, KVFormat] = (PLAIN, PLAIN)

    @property
    def pages(self) -> tuple[int, ...]:
        """Tokens of a page of text and vision."""
        return tuple(GROUP_TOKENS if kind.whole_pages else self.page for kind in self.kinds)

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


@dataclass
class Pages:
    """Hands out page ids of one pool in random order, so that logical neighbours lie apart."""

    ids: list[int]
    taken: int = 0

    def take(self, tokens: int, page: int) -> list[int]:
        count = -(-tokens // page)
        self.taken += count
        return self.ids[self.taken - count : self.taken]


@dataclass
class _Lists:
    """A `QueryGroup` in the making."""

    pages: list[list[int]] = field(default_factory=list)
    reads: list[list[tuple[int, int, int, int]]] = field(default_factory=list)
    masks: list[list[int]] = field(default_factory=list)
    image_pages: list[list[int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    bases: list[int | None] = field(default_factory=list)


@dataclass
class Scene:
    """`groups`: (queries a sequence, its sequences). `text`, `vision`: (K, V) pools. `bases`: by
    group the positions that queries are turned back by before images, None: they are not."""

    shape: Shape
    groups: list[tuple[int, list[Row]]]
    seed: int = 0
    text: kv_formats.Pages = field(init=False)
    vision: kv_formats.Pages = field(init=False)
    q: Tensor = field(init=False)  # [T, H, D] rotated at absolute positions
    plan: AttentionPlan = field(init=False)
    expected: Tensor = field(init=False)  # [T, H, D] float64
    sinks: Tensor | None = field(init=False)  # [H]
    bases: list[list[int | None]] = field(init=False)

    @property
    def scale(self) -> float:
        return float(self.shape.dim**-0.5)

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(self.seed)
        shape, rows = self.shape, [r for _, rs in self.groups for r in rs]
        text_page, vision_page = shape.pages
        text = sum(-(-r.length // text_page) for r in rows) + 2
        images = sum(-(-n // vision_page) for r in rows for _, n in r.images) + 2
        # Whatever nobody wrote is loud: a kernel that reads it is far off.
        self.text, self.vision = (
            self._pool(*each) for each in zip((text, images), shape.pages, shape.kinds, strict=True)
        )
        self._text_pages, self._image_pages = self._pages(text), self._pages(images)
        self.sinks = self._randn(shape.heads) * 2 if shape.learned else None
        self.bases = []
        self._named: dict[tuple[int, int], tuple[list[Key], list[int]]] = {}
        queries: list[Tensor] = []
        answers: list[Tensor] = []
        groups = [self._group(q, rs, queries, answers) for q, rs in self.groups]
        self.q, self.expected = torch.cat(queries), torch.cat(answers)
        none = torch.zeros(0)
        self.plan = AttentionPlan(none.long(), none, none, tuple(groups))

    def _pool(self, pages: int, page: int, kind: KVFormat) -> kv_formats.Pages:
        heads, dim = self.shape.kv_heads, self.shape.dim
        k, v = (self._randn(heads, pages, page, dim) * 100 for _ in "kv")
        if kind.plain:
            return kv_formats.Pages(k, v)
        size = (2, heads, pages, kind.tile_bytes(page, dim))
        keys, values = torch.zeros(size, dtype=torch.uint8)
        pool = kv_formats.Pages(keys, values, kind, page, dim)
        loud = (x.flatten(1, 2).transpose(0, 1) for x in (k, v))
        write_kv(pool, torch.arange(pages * page), *loud)
        return pool

    def _pages(self, count: int) -> Pages:
        return Pages(torch.randperm(count, generator=self._random).tolist())

    def _randn(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._random)

    def _turn(self, x: Tensor, positions: list[int]) -> Tensor:
        """x [T, heads, D] rotated at each token's position."""
        cos, sin = angles(positions, self.shape.dim)
        return rotate(x, cos[:, None], sin[:, None])

    def _group(
        self, num_queries: int, rows: list[Row], queries: list[Tensor], answers: list[Tensor]
    ) -> QueryGroup:
        start = sum(map(len, queries))
        most = max(sum(at < r.length for at, _ in r.images) for r in rows)
        group = _Lists()
        for b, row in enumerate(rows):
            self._row(group, b, most, num_queries, row, queries, answers)
        self.bases.append(group.bases)
        cos, sin = angles([base or 0 for base in group.bases], self.shape.dim)
        reads = torch.tensor(group.reads)
        return QueryGroup(
            start=start,
            num_seqs=len(rows),
            num_queries=num_queries,
            pages=pad(group.pages),
            lo=reads[..., 0],
            hi=reads[..., 1],
            visual_lo=reads[..., 2],
            visual_hi=reads[..., 3],
            image_pages=pad(group.image_pages),
            image_len=torch.tensor(group.lengths, dtype=torch.long),
            image_first=torch.tensor(group.firsts, dtype=torch.long),
            image_row=torch.tensor(group.owners, dtype=torch.long),
            image_slot=torch.tensor(group.slots, dtype=torch.long),
            cos=cos,
            sin=-sin,
            max_images=most,
            sink_tokens=torch.tensor([row.sink_tokens for row in rows]),
            tree=signed(group.masks) if any(row.masks for row in rows) else None,
        )

    def _row(
        self,
        group: _Lists,
        b: int,
        most: int,
        num_queries: int,
        row: Row,
        queries: list[Tensor],
        answers: list[Tensor],
    ) -> None:
        """Write sequence b's keys and values, ask its queries and answer them."""
        first = row.length - num_queries
        asked = range(first, row.length)
        origin, in_context = self.shape.origin, self.shape.in_context
        places = [origin + i + sum(n for at, n in row.images if at <= i) for i in range(row.length)]
        text, pages = self._keys(row.length, places, self.text, self._text_pages)
        group.pages.append(pages)
        reads = [row.read_by(i, n) for n, i in enumerate(asked)]
        group.reads.append(reads)
        masks = row.masks or (0,) * num_queries
        group.masks.append(list(masks))
        visual: list[Key] = []
        before = 0
        for slot, (at, n) in enumerate(i for i in row.images if i[0] < row.length):
            base = origin + at + before
            stored_at = range(base, base + n) if in_context else range(n)
            name = (row.names[slot] if row.names else -1 - len(self._named), stored_at.start)
            if name not in self._named:
                self._named[name] = self._keys(n, stored_at, self.vision, self._image_pages)
            keys, pages = self._named[name]
            visual += [(base + p, k, v) for p, (_, k, v) in enumerate(keys)]
            group.image_pages.append(pages)
            group.slots.append(b * most + slot)
            group.owners.append(b)
            group.lengths.append(n)
            group.bases.append(None if in_context else base)
            group.firsts.append(before)
            before += n
        q = self._randn(num_queries, self.shape.heads, self.shape.dim)
        queries.append(self._turn(q, places[first:]))
        for i, mask, (lo, hi, visual_lo, visual_hi) in zip(asked, masks, reads, strict=True):
            read = text[: min(row.sink_tokens, lo)] + text[lo:hi] + visual[visual_lo:visual_hi]
            read += [text[hi + j] for j in range(64) if mask >> j & 1]
            answers.append(self._answer(q[i - first], places[i], read)[None])

    def _keys(
        self, count: int, stored_at: Iterable[int], pools: kv_formats.Pages, pages: Pages
    ) -> tuple[list[Key], list[int]]:
        """Write `count` new keys, rotated at `stored_at`; they and their pages."""
        k, v = (self._randn(count, self.shape.kv_heads, self.shape.dim) for _ in "kv")
        taken = pages.take(count, pools.size)
        index, places = torch.arange(count), list(stored_at)
        slots = torch.tensor(taken)[index // pools.size] * pools.size + index % pools.size
        write_kv(pools, slots, self._turn(k, places), v)
        if not pools.kind.plain:
            found = read_pages(pools, torch.tensor([taken]))
            k, v = (x[0, :, :count].transpose(0, 1).double() for x in found)
            k = turn(k, -torch.tensor(places)[:, None])
        return list(zip(places, k, v, strict=True)), taken

    def _answer(self, q: Tensor, at: int, read: list[Key]) -> Tensor:
        """q [H, D] at position `at` over (position, key, value)s, all unrotated -> [H, D]."""
        if not read:
            return torch.zeros(q.shape, dtype=torch.float64)
        positions = torch.tensor([p for p, _, _ in read])
        keys = turn(torch.stack([k for _, k, _ in read], 1).double(), positions)  # [Hkv, L, D]
        values = torch.stack([v for _, _, v in read], 1).double()
        asked = turn(q.double(), torch.tensor(at)).view(len(keys), -1, q.shape[1])
        scores = asked @ keys.transpose(1, 2) * self.scale  # [Hkv, G, L]
        if (cap := self.shape.softcap) is not None:
            scores = cap * torch.tanh(scores / cap)
        weights = scores.exp()
        total = weights.sum(-1, keepdim=True)
        if self.sinks is not None:
            total += self.sinks.double().exp().view(len(keys), -1, 1)
        return (weights / total @ values).flatten(0, 1)


def angles(positions: Iterable[int], dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin [T, D / 2] float32 of any positions."""
    step = THETA ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.tensor(list(positions), dtype=torch.float64)[:, None] * step
    return angle.cos().float(), angle.sin().float()


def turn(x: Tensor, positions: Tensor) -> Tensor:
    """x [..., D] float64 rotated as complex numbers: element i goes with element i + D / 2."""
    half = x.shape[-1] // 2
    step = THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions[..., None] * step
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), -1)


def signed(masks: list[list[int]]) -> Tensor:
    """Masks of 64 bits as int64."""
    return torch.tensor([[m - (m >> 63 << 64) for m in row] for row in masks])


def pad(rows: list[list[int]]) -> Tensor:
    width = max(map(len, rows), default=0)
    filled = [r + [0] * (width - len(r)) for r in rows]
    return torch.tensor(filled, dtype=torch.long).view(len(rows), width)


def shapes(*, extras: bool) -> st.SearchStrategy[Shape]:
    """`extras`: capped scores and learned sinks."""
    return st.builds(
        Shape,
        kv_heads=st.integers(1, 3),
        group=st.integers(1, 4),
        dim=st.sampled_from([2, 6, 16]),
        page=st.sampled_from([1, 4, 16]),
        in_context=st.booleans(),
        softcap=st.sampled_from([None, 1.5]) if extras else st.none(),
        learned=st.booleans() if extras else st.just(False),
    )


def lengths(page: int, least: int = 1) -> st.SearchStrategy[int]:
    """Lengths in tokens, most of them at a page border or one beside it."""
    borders = [k * page + d for k in range(4) for d in (-1, 0, 1)]
    return st.sampled_from(sorted({n for n in borders if n >= least} | {least, least + 2}))


@st.composite
def rows(draw: st.DrawFn, page: int, num_queries: int, *, extras: bool) -> Row:
    """`extras`: the first tokens may be read, too."""
    length = draw(lengths(page, num_queries))
    places = sorted(draw(st.lists(st.integers(0, length), max_size=4)))
    images = tuple((at, draw(lengths(page))) for at in places)
    kind = draw(st.sampled_from(["causal", "whole", "any"]))
    if kind != "any":
        return Row(length, images, whole=kind == "whole" and not images)
    visual = sum(n for at, n in images if at < length)
    reads = tuple((*draw(intervals(length)), *draw(intervals(visual))) for _ in range(num_queries))
    return Row(length, images, reads=reads, sink_tokens=draw(st.integers(0, 9)) if extras else 0)


def intervals(end: int) -> st.SearchStrategy[tuple[int, int]]:
    """lo <= hi of 0 .. end."""
    return st.tuples(st.integers(0, end), st.integers(0, end)).map(lambda x: (min(x), max(x)))


@st.composite
def scenes(
    draw: st.DrawFn, queries: st.SearchStrategy[int] | None = None, *, extras: bool = False
) -> Scene:
    shape = draw(shapes(extras=extras))
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        count = draw(queries if queries is not None else st.integers(1, 9))
        of_one = rows(shape.page, count, extras=extras)
        groups.append((count, draw(st.lists(of_one, min_size=1, max_size=3))))
    return Scene(shape, groups, draw(st.integers(0, 99)))


@st.composite
def drafted(draw: st.DrawFn, *, extras: bool = False) -> Scene:
    """Sequences with drafts of any form, perhaps in a short window, and some without beside."""
    shape = draw(shapes(extras=extras))
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        parents = [draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(1, 12)))]
        known, window = draw(lengths(shape.page)), draw(st.sampled_from([1, 3, 20, 1_000_000]))
        places = sorted(draw(st.lists(st.integers(0, known - 1), max_size=2)))
        images = tuple((at, draw(lengths(shape.page))) for at in places)
        count = len(parents) + 1
        others = st.lists(rows(shape.page, count, extras=extras), max_size=1)
        groups.append((count, [Row.draft(known, parents, images, window), *draw(others)]))
    return Scene(shape, groups, draw(st.integers(0, 99)))

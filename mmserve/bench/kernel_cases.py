"""The cases of the `kernels` suite: what each kernel is given and what it cannot do without.

Owns the bytes or operations beside every figure. Knows nothing of engines or weights' meaning: all
numbers are random. What is read comes from more memory than a cache holds, as in a model, where
every layer has its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import sdpa_kernel

from mmserve.bench.ceilings import Ceilings, median_seconds
from mmserve.bench.dims import MISTRAL_7B, TextDims
from mmserve.bench.suite import Case, Line
from mmserve.kernels import attention, sampling, work
from mmserve.kernels.gemv import gemv
from mmserve.kernels.kv_formats import FORMATS, GROUP_TOKENS, PLAIN, KVFormat, Pages
from mmserve.kernels.launch import Launch
from mmserve.kernels.reference import rope_table
from mmserve.kernels.work_builder import WorkBuilder
from mmserve.model.cuda_step import BACKENDS

Call = Callable[[], object]

TERA = 1e12
THETA = 1e6
EPS = 1e-5


class Heads(NamedTuple):
    query: int = 32
    kv: int = 8
    dim: int = 128

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)


class Decode(NamedTuple):
    """One query each over contexts of `lengths` tokens, kept in a format."""

    name: str
    lengths: tuple[int, ...]
    heads: Heads = Heads()
    kind: KVFormat = PLAIN


class Cascade(NamedTuple):
    """`sessions` queries that all see the same images, and each its own text."""

    sessions: int = 64
    images: int = 16
    image_tokens: int = 576
    private: int = 256  # tokens
    heads: Heads = Heads(kv=32)


class Choice(NamedTuple):
    """How tokens are sampled; top_k 0 and top_p 1 switch off."""

    name: str
    top_k: int
    top_p: float


def skewed(count: int, shortest: int, longest: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths of which as many lie between 100 and 200 as between 10,000 and 20,000."""
    spread = np.random.default_rng(seed).uniform(math.log(shortest), math.log(longest), count)
    return tuple(int(length) for length in np.exp(spread).round())


DECODES = (
    Decode("64 x 8192", (8192,) * 64),
    Decode("8 x 65536", (65536,) * 8),
    Decode("64, skewed, 64 to 65536", skewed(64, 64, 65536)),
    Decode("32 x 4096, 32 KV heads", (4096,) * 32, Heads(kv=32)),
    Decode("1 x 512", (512,)),
    Decode("64 x 1024", (1024,) * 64),
    Decode("64 x 4096", (4096,) * 64),
    *(
        Decode(f"64 x 4096, {name}", (4096,) * 64, kind=FORMATS[name])
        for name in ("int8", "fp8_e4m3", "int4", "int2")
    ),
)
CASCADES = (Cascade(), Cascade(images=4, image_tokens=1225, private=300, heads=Heads(28, 4)))
CHOICES = (Choice("top-k 50, top-p 0.9", 50, 0.9), Choice("top-p 0.9", 0, 0.9))


@dataclass(frozen=True)
class Plan:
    """How large the cases are."""

    decode: tuple[Decode, ...] = DECODES
    cascades: tuple[Cascade, ...] = CASCADES
    prefill: tuple[int, ...] = (4096, 8192)  # tokens
    prefill_heads: Heads = Heads()
    products: TextDims = MISTRAL_7B
    logits: tuple[int, int] = (64, 152_064)  # rows, vocabulary
    choices: tuple[Choice, ...] = CHOICES
    page: int = 16  # tokens
    spread_bytes: int = 450_000_000  # read before anything is read again: nine times an H200's L2
    calls: int = 16  # at least, in one captured graph
    repeats: int = 15


def seconds_each(calls: Sequence[Call], device: torch.device, plan: Plan) -> float:
    """Of one call, when all are made in turn, again and again.

    On a GPU from one captured graph, as in a decode step: the host's launches are not measured.
    """
    rounds = -(-plan.calls // len(calls)) if device.type == "cuda" else 1
    made = list(islice(cycle(calls), rounds * len(calls)))

    def make() -> None:
        for call in made:
            call()

    if device.type != "cuda":
        return median_seconds(make, device, repeats=plan.repeats, warm_up=1) / len(made)
    make()  # compiles, which a capture could not
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        make()
    return median_seconds(graph.replay, device, repeats=plan.repeats) / len(made)


class Step(NamedTuple):
    """Attention's queries and results [T, H, D], tables on the device, and how it is launched."""

    q: Tensor
    out: Tensor
    tables: Tensor
    rope: Tensor
    scratch: attention.Scratch
    launch: Launch

    def read(self, own: Pages, vision: Pages) -> None:
        scale = self.q.shape[2] ** -0.5
        attention.paged_attention(
            self.q, self.tables, own, vision, self.rope, scale, self.scratch, self.out, self.launch
        )


@dataclass(frozen=True)
class KernelCases:
    plan: Plan
    device: torch.device
    dtype: torch.dtype
    ceilings: Ceilings

    @property
    def processors(self) -> int:
        if self.device.type != "cuda":
            return 1
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def all(self) -> Iterator[Case]:
        plan = self.plan
        for decode in plan.decode:
            name = f"decode attention {decode.name}"
            yield Case(name, partial(self._decode, name, decode))
        for c in plan.cascades:
            name = f"cascade {c.sessions} queries, the same {c.images} images of {c.image_tokens}"
            yield Case(name, partial(self._cascade, name, c))
        for count in plan.prefill:
            for kind, run in (("dense", self._dense), ("paged", self._paged)):
                name = f"prefill attention 1 x {count}, {kind}"
                yield Case(name, partial(self._prefill, name, count, run))
        for product in products(plan.products):
            name = f"gemv {product.name}"
            yield Case(name, partial(self._gemv, name, [product]))
        name = "gemv, a layer's four in turn"
        yield Case(name, partial(self._gemv, name, products(plan.products)))
        size = " x ".join(map(str, plan.logits))
        yield Case(f"greedy {size}", partial(self._sampling, f"greedy {size}", None))
        for choice in plan.choices:
            name = f"{choice.name} {size}"
            yield Case(name, partial(self._sampling, name, choice))

    # -- attention ------------------------------------------------------------------------------

    def _decode(self, name: str, decode: Decode) -> Iterator[Line]:
        seconds, read = self._decoded(decode)
        figures = {"MB": read / 1e6}
        if not decode.kind.plain:
            figures["x faster than as computed"] = (
                self._decoded(decode._replace(kind=PLAIN))[0] / seconds
            )
        yield self._rate(name, seconds, read, figures)

    def _decoded(self, decode: Decode) -> tuple[float, int]:
        """Seconds, and the bytes that are read once."""
        heads, kind = decode.heads, decode.kind
        page = GROUP_TOKENS if kind.whole_pages else self.plan.page
        counts = [-(-length // page) for length in decode.lengths]
        pages = self._shuffled(counts)
        readers = [
            work.Reader(row, 1, (0, length, 0, 0), mine)
            for row, (length, mine) in enumerate(zip(decode.lengths, pages, strict=True))
        ]
        step = self._step(heads, readers)
        if kind.plain:
            read = self._kv_bytes(heads, sum(decode.lengths))
            size: tuple[int, ...] = (2, heads.kv, sum(counts), page, heads.dim)
            pools = [Pages(*self._random(*size)) for _ in range(self._copies(read))]
        else:
            size = (2, heads.kv, sum(counts), kind.tile_bytes(page, heads.dim))
            read = math.prod(size)
            pools = [self._tiles(size, kind, page, heads.dim) for _ in range(self._copies(read))]
        return seconds_each([partial(step.read, p, p) for p in pools], self.device, self.plan), read

    def _tiles(self, size: tuple[int, ...], kind: KVFormat, page: int, dim: int) -> Pages:
        """Random bytes that make small scales."""
        k, v = torch.randint(64, size, dtype=torch.uint8, device=self.device)
        return Pages(k, v, kind, page, dim)

    def _cascade(self, name: str, c: Cascade) -> Iterator[Line]:
        page = self.plan.page
        private, each = -(-c.private // page), -(-c.image_tokens // page)
        own_pages = self._shuffled([private] * c.sessions)
        images = tuple(
            work.ImagePart(i, pages, c.image_tokens, i * c.image_tokens, i * c.image_tokens)
            for i, pages in enumerate(self._shuffled([each] * c.images))
        )
        reads = (0, c.private, 0, c.images * c.image_tokens)
        readers = [work.Reader(i, 1, reads, own, images) for i, own in enumerate(own_pages)]
        own = Pages(*self._random(2, c.heads.kv, private * c.sessions, page, c.heads.dim))
        vision = Pages(*self._random(2, c.heads.kv, each * c.images, page, c.heads.dim))
        shared = self._step(c.heads, readers)
        unshared = self._step(c.heads, readers, share=False)._replace(q=shared.q)
        fast, slow = (
            seconds_each([partial(step.read, own, vision)], self.device, self.plan)
            for step in (shared, unshared)
        )
        seen = c.images * c.image_tokens
        once, again = seen + c.sessions * c.private, c.sessions * (seen + c.private)
        figures = {
            "us shared": fast * 1e6,
            "us unshared": slow * 1e6,
            "TB/s shared": self._kv_bytes(c.heads, once) / fast / TERA,
            "largest difference": float((shared.out - unshared.out).abs().max()),
        }
        yield Line(name, slow / fast, "x faster", again / once, figures)

    def _prefill(self, name: str, count: int, run: Callable[[int], Call]) -> Iterator[Line]:
        heads, repeats = self.plan.prefill_heads, self.plan.repeats
        seconds = median_seconds(run(count), self.device, repeats=repeats)
        operations = 2 * 2 * heads.query * heads.dim * count**2 / 2  # two products, half is masked
        bound = self.ceilings.flops_per_s / TERA
        figures = {"ms": seconds * 1e3}
        yield Line(name, operations / seconds / TERA, "TFLOP/s", bound, figures)

    def _dense(self, count: int) -> Call:
        heads = self.plan.prefill_heads
        q = self._random(count, heads.query, heads.dim).transpose(0, 1)[None]
        k, v = self._random(2, 1, heads.kv, count, heads.dim)

        def run() -> Tensor:
            with sdpa_kernel(BACKENDS, set_priority=True):
                return functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=heads.scale, enable_gqa=True
                )

        return run

    def _paged(self, count: int) -> Call:
        heads, page = self.plan.prefill_heads, self.plan.page
        (pages,) = self._shuffled([-(-count // page)])
        step = self._step(heads, [work.Reader(0, count, work.causal(0, count), pages)], long=True)
        own = Pages(*self._random(2, heads.kv, len(pages), page, heads.dim))
        return partial(step.read, own, own)

    def _step(
        self, heads: Heads, readers: list[work.Reader], *, share: bool = True, long: bool = False
    ) -> Step:
        """Launched as the runner launches it."""
        builder = WorkBuilder(heads.query // heads.kv, abreast=self.processors // heads.kv)
        num_rows = sum(reader.num_queries for reader in readers)
        tables = builder.build(readers, num_rows, share=share, long=long)
        q = self._random(num_rows, heads.query, heads.dim)
        last = max((i.base or 0 for r in readers for i in r.images), default=0)
        return Step(
            q=q,
            out=torch.empty_like(q),
            tables=torch.from_numpy(work.join([tables])).to(self.device),
            rope=rope_table(last + 1, heads.dim, THETA).to(self.device),
            scratch=attention.Scratch(
                max(tables.num_slots, 1), heads.query, heads.dim, self.device
            ),
            launch=Launch.of([tables], heads.kv, self.processors),
        )

    # -- products and choices -------------------------------------------------------------------

    def _gemv(self, name: str, chosen: list[Product]) -> Iterator[Line]:
        read = sum(p.rows * p.width for p in chosen) * self.dtype.itemsize
        calls: list[Call] = []
        for _ in range(self._copies(read)):
            calls.append(partial(_each, [self._product(p) for p in chosen]))
        yield self._bandwidth(name, calls, read)

    def _product(self, p: Product) -> Call:
        x, weight = self._random(1, p.width), self._random(p.rows, p.width).mul_(0.02)
        out = x.new_zeros(1, p.rows // 2 if p.gated else p.rows)
        norm = (self._random(p.width), EPS) if p.norm else None
        return partial(gemv, x, weight, out, norm=norm, gated=p.gated, add=p.add)

    def _sampling(self, name: str, choice: Choice | None) -> Iterator[Line]:
        """`choice` None: the best."""
        batch, vocab = self.plan.logits
        one: dict[str, Any] = {"device": self.device}
        read = 4 * batch * vocab
        sets = torch.randn(self._copies(read), batch, vocab, **one)
        out = torch.empty(batch, dtype=torch.int64, **one)
        room = sampling.workspace(batch, vocab, self.device)
        if choice is None:
            calls: list[Call] = [partial(sampling.argmax, logits, out, room) for logits in sets]
        else:
            top_k = torch.full((batch,), choice.top_k, dtype=torch.int32, **one)
            temperature, top_p, min_p = (
                torch.full((batch,), value, **one) for value in (0.8, choice.top_p, 0.0)
            )
            filters = (temperature, top_k, top_p, min_p, torch.rand(batch, **one))
            calls = [partial(sampling.sample, logits, *filters, out, room) for logits in sets]
        yield self._bandwidth(name, calls, read)

    # -- what all of them need ------------------------------------------------------------------

    def _bandwidth(self, name: str, calls: Sequence[Call], num_bytes: int) -> Line:
        """`num_bytes`: what one call has to read once."""
        return self._rate(name, seconds_each(calls, self.device, self.plan), num_bytes, {})

    def _rate(self, name: str, seconds: float, num_bytes: int, more: dict[str, float]) -> Line:
        rate = self.ceilings.bytes_per_s
        figures = {"us": seconds * 1e6, "us at the bound": num_bytes / rate * 1e6, **more}
        return Line(name, num_bytes / seconds / TERA, "TB/s", rate / TERA, figures)

    def _copies(self, num_bytes: int) -> int:
        """Of what one call reads, so that no call finds it in a cache."""
        return max(-(-self.plan.spread_bytes // num_bytes), 1)

    def _kv_bytes(self, heads: Heads, num_tokens: int) -> int:
        return 2 * num_tokens * heads.kv * heads.dim * self.dtype.itemsize

    def _random(self, *size: int) -> Tensor:
        return torch.randn(size, dtype=self.dtype, device=self.device)

    def _shuffled(self, counts: Sequence[int]) -> list[work.Int32s]:
        """So many page ids each, all different, in random order."""
        order = torch.randperm(sum(counts), dtype=torch.int32).numpy()
        return np.split(order, np.cumsum(counts)[:-1])


class Product(NamedTuple):
    """One row times a weight [rows, width], and what is fused with it."""

    name: str
    rows: int
    width: int
    norm: bool = False
    gated: bool = False
    add: bool = False


def products(dims: TextDims) -> list[Product]:
    """Those of a decoder layer."""
    q, kv = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    return [
        Product("norm, q k v", q + 2 * kv, dims.hidden, norm=True),
        Product("attention's output, residual", dims.hidden, q, add=True),
        Product("norm, gate and up, SiLU", 2 * dims.ffn, dims.hidden, norm=True, gated=True),
        Product("down, residual", dims.hidden, dims.ffn, add=True),
    ]


def _each(calls: Sequence[Call]) -> None:
    for call in calls:
        call()

"""Every Triton kernel is compiled for an H100 at the smallest sizes and at odd ones; none is run.

Triton makes constants of integer arguments that are 1, and lays out others by what divides them:
both happen at compilation, which the interpreter does without and a GPU need not be there for.
Run by test_compiling.py in a process that does not interpret.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from typing import Any, get_args

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from mmserve.kernels import (
    attention,
    chain,
    fused,
    gemv,
    graft,
    likeliest,
    packed_pages,
    prelude,
    row_attention,
    sampling,
    spans,
)
from mmserve.kernels.kv_formats import FORMATS, GROUP_TOKENS, KVFormat, Pages
from mmserve.kernels.launch import Launch

DTYPES = (torch.bfloat16, torch.float32)


class Board:
    """As much of a driver as compilation asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only() -> None:
    """From here on launches end where the device's part would begin."""
    kernel: Any = jit.JITFunction
    launch = kernel.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    driver.set_active(Board())
    kernel.run = compiled
    chained: Any = chain
    chained._has_chains = chained.has_kernels = lambda device: True


def gemvs() -> None:
    for dtype, num_out, width in itertools.product(DTYPES, (1, 3), (1, 16)):
        x, weight = torch.zeros(1, width, dtype=dtype), torch.zeros(2 * num_out, width, dtype=dtype)
        out = torch.zeros(1, num_out, dtype=dtype)
        gemv.gemv(x, weight, out, bias=out[0], norm=(x[0], 1e-5), add=True)
        gemv.gemv(x, weight, out, gated=True)
        gemv.gemv(x, weight, out, norm=(x[0].float(), 1e-6), gated=True, gate="gelu")
        norm: dict[str, Any] = {"norm": (x[0], 1e-5), "centred": weight[:, 0].float()}
        gemv.gemv(
            x, weight, out, bias=weight[:, 0].float(), opened=out.clone(), gate="gelu", **norm
        )


def pool(
    kv_heads: int, pages: int, dim: int, dtype: torch.dtype, size: int = 1
) -> tuple[Tensor, Tensor]:
    """K and V, with so many tokens a page."""
    k, v = torch.zeros(2, kv_heads, pages, size, dim, dtype=dtype).unbind(0)
    return k, v


def elementwise() -> None:
    for dtype, tokens, width in itertools.product(DTYPES, (1, 3), (1, 48)):
        x = torch.zeros(tokens, width, dtype=dtype)
        gain = torch.zeros(width)
        fused.add_rms_norm(x, x, x[0], 1e-5, x)
        fused.add_rms_norm(x, x, gain, 1e-6, x, after=(gain, 1e-6))
        fused.add_normed(x, x, gain, 1e-6)
        for gate in get_args(fused.Gate):
            fused.gated_mul(torch.zeros(tokens, 2 * width, dtype=dtype), x, gate)
    for dtype, tokens, pages, dim in itertools.product(DTYPES, (1, 3), (1, 4), (2, 128)):
        kv = pool(1, pages, dim, dtype)
        slots = torch.zeros(tokens, dtype=torch.int32)
        turns = fused.Turns.by_table(torch.zeros(1, 2, dim // 2), slots)
        norm = fused.HeadNorm(torch.zeros(dim), torch.zeros(dim), 1e-6)
        q = torch.zeros(tokens, 1, dim, dtype=dtype)
        qkv = q.expand(-1, 3, -1).flatten(1)
        for rotary in {dim, max(dim * 3 // 4, 2)}:
            fused.rotate_store(qkv, turns, slots, q, Pages(*kv), Pages(*kv), norm, rotary)
        fused.store(q, q, slots, Pages(*kv), Pages(*kv))


def choices() -> None:
    for batch, vocab in itertools.product((1, 3), (1, 5000)):
        logits, each = torch.zeros(batch, vocab), torch.zeros(batch)
        work = sampling.workspace(batch, vocab, logits.device)
        out = torch.zeros(batch, dtype=torch.long)
        sampling.sample(logits, each, each.int(), each, each, each, out, work)
        sampling.argmax(logits.bfloat16(), out, work)


def attend(q: Tensor, kv_heads: int, pages: int, launch: Launch, **options: Any) -> None:
    heads, dim = q.shape[1:]
    kv = pool(kv_heads, pages, dim, q.dtype)
    scratch = attention.Scratch(1, heads, dim, q.device)
    work, rope = torch.zeros(64, dtype=torch.int32), torch.zeros(1, 2, dim // 2)
    attention.paged_attention(
        q, work, Pages(*kv), Pages(*kv), rope, 1.0, scratch, q, launch, **options
    )


def attentions() -> None:
    launch = Launch(small=1, large=1, merge=16, tile_rows=32)
    attend(torch.zeros(1, 1, 2), 1, 1, launch, sinks=torch.zeros(1))
    attend(torch.zeros(3, 7, 80, dtype=torch.bfloat16), 1, 5, launch._replace(trees=True))
    few = launch._replace(few=True)
    attend(torch.zeros(3, 7, 80, dtype=torch.bfloat16), 1, 5, few, softcap=30.0)


def bests() -> None:
    for dtype, rows, width, normed in itertools.product(DTYPES, (1, 3), (1, 8192), (False, True)):
        scores = torch.zeros(rows, width, dtype=dtype)
        likeliest.likeliest(scores, min(width, 8), normed=normed)


def packed(kind: KVFormat, dim: int, kv_heads: int = 1) -> Pages:
    size = (2, kv_heads, 4, kind.tile_bytes(GROUP_TOKENS, dim))
    k, v = torch.zeros(size, dtype=torch.uint8)
    return Pages(k, v, kind, GROUP_TOKENS, dim)


def formats() -> None:
    """Of both pools, and of the vision pool beside text as it is computed."""
    launch = Launch(small=1, large=0, merge=0, tile_rows=32)
    q, work = torch.zeros(3, 4, 64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int32)
    scratch, rope = attention.Scratch(1, 4, 64, q.device), torch.zeros(1, 2, 32)
    plain = Pages(*pool(1, 5, 64, q.dtype))
    for name in ("fp8_e4m3", "fp8_e5m2", "int8", "int4", "int2_outliers"):
        vision = packed(FORMATS[name], 64)
        own = plain if name in ("int8", "int4") else vision
        if own is plain or not vision.kind.whole_pages:
            turns = fused.Turns.by_table(rope, work[:3])
            fused.rotate_store(torch.zeros(3, 6 * 64), turns, work[:3], q, own, vision)
            fused.store(q[:, :1], q[:, :1], work[:3], own, vision)
        attention.paged_attention(q, work, own, vision, rope, 1.0, scratch, q, launch)
    large = launch._replace(large=1, newest=1)
    text = packed(FORMATS["int4"], 64)._replace(residual=Pages(*pool(1, 5, 64, q.dtype, 64)))
    packed_pages.fill_pages(text, work[:3], work[:3])
    attention.paged_attention(q, work, text, plain, rope, 1.0, scratch, q, large)


def decoding() -> None:
    """What decodes sequences in few bits, at the commonest sizes, keeps all it has in registers."""
    spilled: list[str] = []
    kernel: Any = jit.JITFunction
    launch = kernel.run

    def looked_at(self: Any, *args: Any, **options: Any) -> Any:
        compiled = launch(self, *args, **options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        if int(re.findall(r"STACK:(\d+)", told)[-1]):
            spilled.append(f"{self.fn.__name__} of {name}: {told}")
        return compiled

    kernel.run = looked_at
    dim, heads, kv_heads = 128, 32, 8
    q, work = torch.zeros(3, heads, dim, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int32)
    scratch, rope = attention.Scratch(1, heads, dim, q.device), torch.zeros(1, 2, dim // 2)
    for name in ("int8", "int4", "int2"):
        pages = packed(FORMATS[name], dim, kv_heads)
        text, rest = pages, Pages(*pool(kv_heads, 4, dim, q.dtype, GROUP_TOKENS))
        if pages.kind.whole_pages:
            text = pages._replace(residual=rest)
        few = Launch(1, 0, 0, 32, newest=int(text is not pages))
        attention.paged_attention(q, work, text, pages, rope, 1.0, scratch, q, few)
    kernel.run = launch
    assert not spilled, spilled


def grafts() -> None:
    for tokens, grown in itertools.product((1, 3), (1, 5)):
        work, rows = torch.zeros(64, dtype=torch.int32), torch.zeros(4, tokens, dtype=torch.int32)
        each = torch.zeros(4, grown, dtype=torch.int32)
        graft.graft(work, rows, each, -101, axes=1, sets=1)


def rows() -> None:
    shapes = [(dtype, 1, 1, 2, 2) for dtype in DTYPES]
    shapes += [(torch.bfloat16, 8, 4, 256, 256), (torch.bfloat16, 2, 2, 80, 32)]
    for dtype, heads, kv_heads, dim, rotary in shapes:
        qkv = torch.zeros(1, (heads + 2 * kv_heads) * dim, dtype=dtype)
        slots, work = torch.zeros(1, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
        table, kv = torch.zeros(1, 2, dim // 2), Pages(*pool(kv_heads, 4, dim, dtype))
        scratch, out = attention.Scratch(1, heads, dim, qkv.device), qkv.new_zeros(1, heads, dim)
        rest = (work, kv, kv, table, 1.0, scratch, out, Launch(132, 0, 16, 32))
        norm = fused.HeadNorm(torch.zeros(dim), torch.zeros(dim), 1e-6)
        placed = fused.Turns.by_table(table, slots)
        row_attention.attend_row(qkv, placed, slots, *rest, norm=norm, rotary=rotary)
        own = fused.Turns(qkv[:, :rotary], qkv[:, :rotary])
        row_attention.attend_row(qkv, own, slots, *rest, rotary=rotary, softcap=30.0)


def preludes() -> None:
    for dtype, tokens, width in itertools.product(DTYPES, (1, 3), (1, 1030)):
        ids, table = torch.zeros(tokens, dtype=torch.int32), torch.zeros(2, width, dtype=dtype)
        rows = table.new_zeros(tokens, width)
        prelude.embed(ids, ids.long(), table, rows, 2.0)
        twice = table.new_zeros(tokens, 2 * width)
        for regimes in (None, ids.long()):
            prelude.angles(ids.long(), regimes, table.float(), twice[0].float(), twice, twice)


def towers() -> None:
    for dtype, tokens, heads, dim in itertools.product(DTYPES, (1, 3), (1, 3), (2, 80)):
        q, k, v = (packed := torch.zeros(tokens, 3, heads, dim, dtype=dtype)).unbind(1)
        angles = torch.zeros(tokens, dim)
        spans.turn(packed[:, :2], angles, angles)
        borders = torch.tensor([0, tokens], dtype=torch.int32)
        spans.attend(q, k, v, borders, tokens, 1.0, torch.zeros_like(q))


PARTS = {
    "formats": (formats,),
    "decoding": (decoding,),
    "rest": (gemvs, elementwise, choices, attentions, grafts, bests, preludes, rows, towers),
}

if __name__ == "__main__":
    compile_only()
    for kernels in PARTS[sys.argv[1]]:
        kernels()

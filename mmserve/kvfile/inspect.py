"""What `mmserve kv inspect` shows of a file.

Owns the table's words. Knows nothing of how a file is read or used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mmserve.kvfile.file import KVFile, read_file
from mmserve.kvfile.header import VERSION, Group, image_name, text_name

MIB = 1024**2


def inspect(path: Path) -> str:
    """A table of a whole file, every checksum compared. Raises as `read_file` does."""
    file = read_file(path)
    return "\n".join((*_model(file), *_texts(file), *_images(file)))


def _model(file: KVFile) -> Iterator[str]:
    own = file.header.identity
    yield f"version      {VERSION}, all {len(file.tensors)} checksums agree"
    yield f"model        {own.architecture}, weights {own.weights_dtype}"
    for name in ("weights", "tokenizer", "processor"):
        yield f"{name:12} {getattr(own, name)}"
    yield f"vision mode  {own.vision_mode}"
    yield f"KV           {own.dtype}, pages of {own.page_size} tokens"
    for number, group in enumerate(own.groups):
        yield f"group {number}      {_describe(group)}"


def _describe(group: Group) -> str:
    reads = " and ".join(n for n in ("text", "images") if getattr(group, n))
    window = "everything" if group.window is None else f"a window of {group.window} tokens"
    heads = f"{group.kv_heads} KV heads of {group.head_dim}"
    formats = f"text in {group.text_format}, images in {group.image_format}"
    return f"{len(group.layers)} layers, {heads}, reading {reads}, {window}; {formats}"


def _texts(file: KVFile) -> Iterator[str]:
    header = file.header
    depth: list[int] = []  # tokens of the prefix that a run ends
    rows = []
    for number, run in enumerate(header.runs):
        depth.append(len(run.tokens) + (0 if run.parent is None else depth[run.parent]))
        names = [text_name(number, g) for g, pages in enumerate(run.pages) if pages]
        marks = sum(len(names) for _, names in run.marks)
        parent = "-" if run.parent is None else str(run.parent)
        rows.append((str(number), parent, len(run.tokens), depth[-1], marks, _size(file, names)))
    yield from _table(
        f"text: {len(rows)} runs, {header.num_text_tokens} tokens",
        ("run", "parent", "tokens", "prefix", "marks", "MiB"),
        rows,
    )


def _images(file: KVFile) -> Iterator[str]:
    rows = [
        (image.key.hex(), image.num_tokens, _size(file, [image_name(n, g) for g in image.groups]))
        for n, image in enumerate(file.header.images)
    ]
    tokens = sum(image.num_tokens for image in file.header.images)
    title = f"images: {len(rows)}, {tokens} tokens"
    yield from _table(title, ("key", "tokens", "MiB"), rows)


def _size(file: KVFile, names: Sequence[str]) -> str:
    return f"{sum(file.tensors[name].nbytes for name in names) / MIB:.2f}"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    yield f"\n{title}"
    if not rows:
        return
    lines = [head, *(tuple(map(str, row)) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        yield "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))

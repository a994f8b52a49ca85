"""What a KV file says of itself: whose keys and values it holds, and of which tokens and images.

Owns the header's words, their JSON and what makes them consistent. Standard library only; knows
nothing of tensors, pools or files. The format is described in docs/kv-format.md.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FORMAT = "mmserve-kv"
VERSION = 2

OF_WEIGHTS = ("weights", "weights_dtype", "processor")  # words of an identity

Kind = Literal["text", "image"]
Shape = tuple[int, ...]
PLAIN = "auto"  # the format that is no other: as the model computes


class KVFileError(ValueError):
    """A file that cannot be used: what is wrong, and where."""


class KVMismatchError(KVFileError):
    """A whole file of keys and values that are not this engine's. `field`: which word differs."""

    def __init__(self, field: str, ours: Any, theirs: Any) -> None:
        super().__init__(f"{field} differs: here {ours!r}, in the file {theirs!r}")
        self.field, self.ours, self.theirs = field, ours, theirs


@dataclass(frozen=True)
class Group:
    """Layers that share page tables, as `LayerGroup`, and what one token takes in each of them.

    `text_format`, `image_format`: by the names of mmserve.kernels.kv_formats; `text_tile`,
    `image_tile`: bytes of one head's page of K, or of V, in them, None where they are plain.
    """

    layers: tuple[int, ...]
    window: int | None
    text: bool
    images: bool
    kv_heads: int
    head_dim: int
    text_format: str = PLAIN
    image_format: str = PLAIN
    text_tile: int | None = None
    image_tile: int | None = None

    def tile(self, kind: Kind) -> int | None:
        return self.text_tile if kind == "text" else self.image_tile


@dataclass(frozen=True)
class Identity:
    """All that keys and values depend on beside tokens and images. Equal identities: equal KV.

    `weights`, `tokenizer`, `processor`: fingerprints, hexadecimal. `weights_dtype`: how the weights
    are held; `dtype`: how the model computes KV, and holds it where a format is plain.
    """

    architecture: str
    weights: str
    weights_dtype: str
    tokenizer: str
    processor: str
    vision_mode: str
    rope: Mapping[str, Any]
    page_size: int
    dtype: str
    groups: tuple[Group, ...]

    def shape(self, group: int, kind: Kind, pages: int) -> Shape:
        """[layers, 2 (K, V), kv_heads, pages, page_size, head_dim], or [..., bytes of a tile]."""
        own = self.groups[group]
        tile = own.tile(kind)
        rest = (self.page_size, own.head_dim) if tile is None else (tile,)
        return (len(own.layers), 2, own.kv_heads, pages, *rest)

    def stored(self, group: int, kind: Kind) -> str:
        """The dtype of such a tensor."""
        return self.dtype if self.groups[group].tile(kind) is None else "uint8"

    def require(self, theirs: Identity, compatible: Collection[str] = ()) -> None:
        """Raises `KVMismatchError`, naming the first word in which a file's identity differs.

        `compatible`: fingerprints of weights that are declared to be nearly these; of theirs all
        may differ that the weights decide: how they are held, and what images are known by.
        """
        near = OF_WEIGHTS if theirs.weights in compatible else ()
        for (name, mine), (_, other) in zip(self.words(), theirs.words(), strict=False):
            if mine != other and name not in near:
                raise KVMismatchError(name, mine, other)

    def words(self) -> Iterator[tuple[str, Any]]:
        """By name, the coarse ones first; a group's by its number."""
        # Images are known by other names where they are held in another format: this comes first.
        yield "formats", sorted({(of.text_format, of.image_format) for of in self.groups})
        for own in dataclasses.fields(self):
            if own.name != "groups":
                yield own.name, getattr(self, own.name)
        yield "groups", len(self.groups)
        for number, group in enumerate(self.groups):
            for name, value in vars(group).items():
                yield f"groups[{number}].{name}", value


@dataclass(frozen=True)
class TextRun:
    """Whole pages of text tokens behind those of the run `parent` (None: from the start).

    `marks`: (index, names) where something stands directly before a token: images, and salts.
    `pages`: by layer group, which of the run's pages are there, ascending; windows have holes.
    """

    parent: int | None
    tokens: tuple[int, ...]
    marks: tuple[tuple[int, tuple[bytes, ...]], ...]
    pages: tuple[tuple[int, ...], ...]

    @property
    def keys(self) -> list[Hashable]:
        """As `Sequence.keys` has them."""
        keys: list[Hashable] = list(self.tokens)
        for index, names in self.marks:
            keys[index] = (*names, self.tokens[index])
        return keys


@dataclass(frozen=True)
class StoredImage:
    """An image's KV under its key. `groups`: the layer groups in which it is there."""

    key: bytes
    num_tokens: int
    groups: tuple[int, ...]


@dataclass(frozen=True)
class KVHeader:
    """`runs`, parents first, and `images`: the most useful first. `checksums`: by tensor."""

    identity: Identity
    runs: tuple[TextRun, ...] = ()
    images: tuple[StoredImage, ...] = ()
    checksums: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_text_tokens(self) -> int:
        return sum(len(run.tokens) for run in self.runs)

    def image_pages(self, image: StoredImage) -> int:
        return -(-image.num_tokens // self.identity.page_size)

    def shapes(self) -> dict[str, Shape]:
        """Every tensor of the file, as `Identity.shape` has them."""
        held = self._held()
        return {name: self.identity.shape(g, kind, pages) for name, g, kind, pages in held}

    def dtypes(self) -> dict[str, str]:
        """Of the same tensors."""
        return {name: self.identity.stored(g, kind) for name, g, kind, _ in self._held()}

    def _held(self) -> Iterator[tuple[str, int, Kind, int]]:
        """Of every tensor: its name, group, kind and pages."""
        for n, run in enumerate(self.runs):
            for g, pages in enumerate(run.pages):
                if pages:
                    yield text_name(n, g), g, "text", len(pages)
        for n, image in enumerate(self.images):
            for g in image.groups:
                yield image_name(n, g), g, "image", self.image_pages(image)

    def to_json(self) -> str:
        words = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        return json.dumps(words, default=bytes.hex, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> KVHeader:
        """Raises `KVFileError` for what is no header, or one that contradicts itself."""
        try:
            words = json.loads(text)
            if (words["format"], words["version"]) != (FORMAT, VERSION):
                raise KVFileError(
                    f"the file is {words['format']!r} version {words['version']!r}; "
                    f"known is {FORMAT!r} version {VERSION}"
                )
            header = cls(
                identity_from(words["identity"]),
                tuple(map(_run, words["runs"])),
                tuple(map(_image, words["images"])),
                dict(words["checksums"]),
            )
            header.check()
        except KVFileError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise KVFileError(
                f"the header is malformed: {type(error).__name__}: {error}"
            ) from error
        return header

    def check(self) -> None:
        """Raises `KVFileError` where a run or an image cannot be what it says."""
        for number, run in enumerate(self.runs):
            if wrong := self._fault_of_run(number, run):
                raise KVFileError(f"runs[{number}].{wrong}")
        keys: set[bytes] = set()
        for number, image in enumerate(self.images):
            if image.key in keys:
                raise KVFileError(f"images[{number}].key stands there before")
            keys.add(image.key)
            groups = range(len(self.identity.groups))
            known = [g for g in groups if self.identity.groups[g].images and g in image.groups]
            if image.num_tokens < 1 or not image.key:
                raise KVFileError(f"images[{number}] has no tokens or no key")
            if not known or known != list(image.groups):
                raise KVFileError(f"images[{number}].groups are not groups with images, ascending")

    def _fault_of_run(self, number: int, run: TextRun) -> str | None:
        size, groups = self.identity.page_size, self.identity.groups
        num_pages, rest = divmod(len(run.tokens), size)
        if rest or not num_pages or min(run.tokens) < 0:
            return f"tokens are not whole pages of {size} tokens"
        if run.parent is not None and not 0 <= run.parent < number:
            return "parent is no run before it"
        if any(not 0 <= index < len(run.tokens) or not names for index, names in run.marks):
            return "marks are not before its tokens"
        if len(run.pages) != len(groups):
            return "pages are not those of every group"
        for group, pages in zip(groups, run.pages, strict=True):
            whole = list(range(num_pages)) if group.text else []
            there = set(pages)
            wrong = [i for i in whole if i in there] != list(pages)
            if wrong or (group.window is None and list(pages) != whole):
                return "pages are not what their groups can have"
        return None


def text_name(run: int, group: int) -> str:
    """The tensor of a run's pages in a layer group."""
    return f"text.{run}.{group}"


def image_name(image: int, group: int) -> str:
    return f"image.{image}.{group}"


def identity_from(words: Mapping[str, Any]) -> Identity:
    """From JSON. Raises `KVFileError`, or what Python raises for words of other kinds."""
    groups = tuple(_group(group) for group in words["groups"])
    made = Identity(**{**words, "groups": groups})
    texts = ("architecture", "weights", "weights_dtype", "tokenizer", "processor", "vision_mode")
    for name in (*texts, "dtype"):
        _need(name, getattr(made, name), str)
    if _need("page_size", made.page_size, int) < 1 or not groups:
        raise KVFileError("page_size or groups: there are none")
    return made


def _group(words: Mapping[str, Any]) -> Group:
    made = Group(**{**words, "layers": _numbers(words["layers"])})
    for name in ("kv_heads", "head_dim"):
        if _need(name, getattr(made, name), int) < 1:
            raise KVFileError(f"{name} is {getattr(made, name)}")
    formats = ((made.text_format, made.text_tile), (made.image_format, made.image_tile))
    for name, tile in formats:
        if (_need("a format", name, str) == PLAIN) != (tile is None):
            raise KVFileError(f"a tile of format {name} is {tile!r}")
        if tile is not None and _need("a tile", tile, int) < 1:
            raise KVFileError(f"a tile of format {name} is {tile}")
    return made


def _run(words: Mapping[str, Any]) -> TextRun:
    marks = tuple(
        (_need("index", index, int), tuple(map(bytes.fromhex, names)))
        for index, names in words["marks"]
    )
    parent = words["parent"]
    return TextRun(
        None if parent is None else _need("parent", parent, int),
        _numbers(words["tokens"]),
        marks,
        tuple(map(_numbers, words["pages"])),
    )


def _image(words: Mapping[str, Any]) -> StoredImage:
    count = _need("num_tokens", words["num_tokens"], int)
    return StoredImage(bytes.fromhex(words["key"]), count, _numbers(words["groups"]))


def _need(name: str, value: Any, kind: Callable[..., Any]) -> Any:
    if type(value) is not kind:
        raise KVFileError(f"{name} is {value!r}")
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(_need("a number", value, int) for value in values)

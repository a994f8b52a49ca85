"""Make-believe KV of every layer group: slots hold names of what was computed, not numbers.

A text slot holds a hash of every key up to its token, a vision page the key of its image. Owns who
reads what, token by token: a row at place p among all tokens of its sequence, text and visual ones,
reads [p + 1 - window, p] of them, an image that is encoded by itself only itself, and where a
prompt with images sees itself a row of it all of the prompt, past windows, too. Slow, and written
without a look at the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seqs

from mmserve.cache.layer_group import LayerGroup
from mmserve.placed import PlacedImage
from mmserve.scheduler.batch import Chunk, PageCopy
from mmserve.sequence import Sequence

PAGE = 4

Token = int | PlacedImage  # a text index; or one token of an image


def history(seq: Sequence, pending: Iterable[int] = ()) -> list[int]:
    """What the slot of each of the sequence's tokens must hold; `pending`: what will land."""
    value, names = 0, []
    keys = list(seq.keys)
    for token in pending:
        before = () if len(keys) > len(seq.keys) else tuple(seq._before_next)
        keys.append((*before, token) if before else token)
    for key in keys:
        value = hash((value, key))
        names.append(value)
    return names


def layout(seq: Sequence, end: int | None = None) -> list[Token]:
    """All tokens of a sequence in order, up to text token `end`."""
    tokens: list[Token] = []
    end = seq.num_tokens if end is None else end
    for index in range(end + 1):
        for placed in seq.images:
            if placed.text_index == index and (index < end or end == seq.num_tokens):
                tokens += [placed] * placed.image.num_tokens
        tokens += [index] if index < end else []
    return tokens


class Memory:
    def __init__(self, groups: tuple[LayerGroup, ...]) -> None:
        self.groups = groups
        self.text: list[dict[int, int]] = [{} for _ in groups]  # slot -> history
        self.vision: list[dict[int, bytes]] = [{} for _ in groups]  # page -> key
        self._writers: dict[tuple[int, int], Sequence] = {}  # of vision pages in this step

    def reads(self, seq: Sequence, rows: set[int], group: LayerGroup) -> set[int]:
        """Of the rows at these places: the places that they read."""
        tokens = [*layout(seq), seq.num_tokens]
        prompt = seq.num_prompt_tokens + seq.num_image_tokens if seq.whole_prompt else 0
        found: set[int] = set()
        for row in rows:
            if row < prompt and seq.images:
                found.update(range(prompt))
            else:
                first = 0 if group.window is None else max(row + 1 - group.window, 0)
                found.update(range(first, row + 1))
        kinds = {True: group.text, False: group.images}
        return {p for p in found if kinds[isinstance(tokens[p], int)]}

    def rows_to_come(self, seq: Sequence, start: int, ready: set[tuple[int, bytes]]) -> set[int]:
        """The places to be computed from text token `start` on, where these images, by group, are
        there: all text from there and one token more, and every image that one of these rows reads
        in vain."""
        tokens = [*layout(seq), seq.num_tokens]
        rows = {p for p, t in enumerate(tokens) if isinstance(t, int)}
        rows = {p for p in rows if tokens[p] >= start}  # type: ignore[operator]
        while True:
            lacking = {
                id(tokens[p])
                for g, group in enumerate(self.groups)
                for p in self.reads(seq, rows, group)
                if isinstance(placed := tokens[p], PlacedImage)
                and placed.in_context
                and (g, placed.key) not in ready
            }
            more = {p for p, token in enumerate(tokens) if id(token) in lacking}
            if more <= rows:
                return rows
            rows |= more

    def encode(self, pages: list[list[int]], key: bytes) -> None:
        for store, held in zip(self.vision, pages, strict=True):
            store.update(dict.fromkeys(held, key))

    def copy(self, copies: Seqs[PageCopy]) -> None:
        """All at once."""
        read = [[self.text[c.group].get(c.source * PAGE + i) for i in range(PAGE)] for c in copies]
        for copy, names in zip(copies, read, strict=True):
            for i, name in enumerate(names):
                if name is not None:
                    self.text[copy.group][copy.target * PAGE + i] = name

    def write(self, chunk: Chunk, names: list[int]) -> None:
        seq = chunk.seq
        for g, group in enumerate(self.groups):
            if group.text:
                for i in range(chunk.start, chunk.start + chunk.count):
                    self.text[g][self.slot(seq, g, i)] = names[i]
            for context in chunk.images:
                if context.writes[g]:
                    assert context.placed.pages is not None
                    for page in context.placed.pages[g]:
                        self.vision[g][page] = context.placed.key
                        self._writers[g, page] = seq

    def read(self, chunk: Chunk, names: list[int]) -> None:
        """Every row of a chunk finds what it reads, by now and in no other's hands."""
        seq = chunk.seq
        tokens = layout(seq)
        own = {id(context.placed) for context in chunk.images}
        texts = range(chunk.start, chunk.start + chunk.count)
        rows = {p for p, t in enumerate(tokens) if t in texts or id(t) in own}
        for g, group in enumerate(self.groups):
            for place in self.reads(seq, rows, group):
                token = tokens[place]
                if isinstance(token, int):
                    found = self.text[g].get(self.slot(seq, g, token))
                    assert found == names[token], "other text stands in the sequence's pages"
                    continue
                assert token.pages is not None and token.pages[g], "an image is read, not held"
                stored = {self.vision[g].get(page) for page in token.pages[g]}
                assert stored == {token.key}, "another image stands in the pages"
                writers = {self._writers.get((g, page), seq) for page in token.pages[g]}
                assert writers == {seq}, "an image is read in the step in which another writes it"

    def end_step(self) -> None:
        self._writers.clear()

    def slot(self, seq: Sequence, group: int, index: int) -> int:
        page = seq.tables[group][index // PAGE]
        assert page >= 0, "a page that was given back is used"
        return page * PAGE + index % PAGE

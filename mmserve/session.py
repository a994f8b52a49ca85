"""What a conversation keeps and what it lets go: policy, state, and where a cut falls.

Owns values alone, each immutable and with a JSON form, and the rule of cuts. Knows nothing of
tokens' ids, of pages, of HTTP or of where items are kept. An image is named by the SHA-256 of its
file's bytes, in hexadecimal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Forgetting = Literal["recompute", "mark"]
FORGETTING: tuple[Forgetting, ...] = ("recompute", "mark")
SINKS = 4  # first tokens that attention leans on


@dataclass(frozen=True)
class SessionPolicy:
    """What a conversation may hold.

    `window`: text tokens; None: as many as the context takes. `sinks`: first tokens that stay at
    least when text is dropped inside a turn. `images`: which images of dropped turns stay readable:
    "all", "pinned", or a number: as many of the newest as make it up together with those in the
    turns that stay. Pinned images always stay. `summary`: a summary stands for what was dropped.
    """

    window: int | None = None
    sinks: int = SINKS
    images: int | Literal["all", "pinned"] = "all"
    summary: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "window": self.window,
            "sinks": self.sinks,
            "images": self.images,
            "summary": self.summary,
        }

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> SessionPolicy:
        return cls(body["window"], body["sinks"], body["images"], body["summary"])


@dataclass(frozen=True)
class SessionState:
    """A conversation's policy and what became of its items and images so far.

    `dropped` of the oldest items are out: `dropped_tokens` of text and `dropped_images` images that
    cannot be read any more. `num_images` have come in all, so that the next one's number is known.
    `summary` stands for what is out; `missing` says in a sentence why an up-to-date one does not.
    """

    policy: SessionPolicy | None = None
    dropped: int = 0
    dropped_tokens: int = 0
    dropped_images: int = 0
    num_images: int = 0
    summary: str | None = None
    missing: str | None = None
    pinned: frozenset[str] = frozenset()
    forgotten: dict[str, Forgetting] = field(default_factory=dict)  # by digest; never changed

    def pin(self, digest: str) -> SessionState:
        """Cuts leave it in, whatever the policy; a forgotten one is shown again."""
        return replace(self.restore(digest), pinned=self.pinned | {digest})

    def unpin(self, digest: str) -> SessionState:
        return replace(self, pinned=self.pinned - {digest})

    def forget(self, digest: str, how: Forgetting) -> SessionState:
        """Not shown any more. "recompute": as if it had never been seen; "mark": text that saw it
        stays as it is."""
        forgotten = {**self.forgotten, digest: how}
        return replace(self.unpin(digest), forgotten=forgotten)

    def restore(self, digest: str) -> SessionState:
        """Undo `forget`."""
        kept = {known: how for known, how in self.forgotten.items() if known != digest}
        return replace(self, forgotten=kept)

    def to_json(self) -> dict[str, Any]:
        return {
            "policy": None if self.policy is None else self.policy.to_json(),
            "dropped": self.dropped,
            "dropped_tokens": self.dropped_tokens,
            "dropped_images": self.dropped_images,
            "num_images": self.num_images,
            "summary": self.summary,
            "missing": self.missing,
            "pinned": sorted(self.pinned),
            "forgotten": self.forgotten,
        }

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> SessionState:
        policy = body["policy"]
        return cls(
            None if policy is None else SessionPolicy.from_json(policy),
            body["dropped"],
            body["dropped_tokens"],
            body["dropped_images"],
            body["num_images"],
            body["summary"],
            body["missing"],
            frozenset(body["pinned"]),
            body["forgotten"],
        )


@dataclass(frozen=True)
class Line:
    """One item as a cut sees it: `tokens` of text, and the images in it, oldest first.

    `role`: system items always stay; a head (what stands for turns that were cut before) holds
    images that may go, and is no part of a turn. A turn begins with a user item.
    """

    role: str  # system | head | user | assistant | tool
    tokens: int
    images: tuple[str, ...] = ()

    @property
    def fixed(self) -> bool:
        return self.role in ("system", "head")


@dataclass(frozen=True)
class Cut:
    """Items from `first` on stay whole, and of those before it: system items, and `images`, each
    by its item's index and its own within the item, oldest first."""

    first: int
    images: tuple[tuple[int, int], ...] = ()


def turns(lines: Sequence[Line]) -> list[int]:
    """Where turns begin, oldest first."""
    starts: list[int] = []
    before = ""
    for i, line in enumerate(lines):
        if line.fixed:
            continue
        if not starts or (line.role == "user" and before != "user"):
            starts.append(i)
        before = line.role
    return starts


def plan_cut(
    state: SessionState,
    lines: Sequence[Line],
    *,
    window: int,
    rest: int = 0,
    max_images: int | None = None,
) -> Cut:
    """Which turns and images stay, once a conversation has outgrown its window.

    Whole turns go, oldest first, until at most half of `window` text tokens is taken, so that cuts
    are rare; the newest turn stays in any case. `rest`: text tokens beside the items (instructions,
    tools). `max_images`: what there is room for; only those of the newest turn and pinned ones may
    be more.
    """
    first, shown = _oldest_kept(state, lines, window // 2 - rest, max_images)
    policy = state.policy or SessionPolicy()
    wanted: int | None = None
    if isinstance(policy.images, int):
        wanted = policy.images
    kept: list[tuple[int, int]] = []
    for i in reversed(range(first)):
        for k in reversed(range(len(lines[i].images))):
            digest = lines[i].images[k]
            if digest in state.forgotten or lines[i].role == "system":
                continue
            room = all(limit is None or shown < limit for limit in (wanted, max_images))
            if digest in state.pinned or (room and policy.images != "pinned"):
                kept.append((i, k))
                shown += 1
    return Cut(first, tuple(reversed(kept)))


def _oldest_kept(
    state: SessionState, lines: Sequence[Line], text: int, max_images: int | None
) -> tuple[int, int]:
    """The first line of the oldest turn that stays, and the images from there on."""
    starts = turns(lines)
    text -= sum(line.tokens for line in lines if line.fixed)
    first, end, shown = len(lines), len(lines), 0
    for start in reversed(starts):
        turn = [line for line in lines[start:end] if not line.fixed]
        images = [d for line in turn for d in line.images if d not in state.forgotten]
        text -= sum(line.tokens for line in turn)
        full = text < 0 or (max_images is not None and shown + len(images) > max_images)
        if full and start != starts[-1]:
            break
        first, end, shown = start, start, shown + len(images)
    return first, shown

"""Where a history is cut: sizes of its items, which of them go, and what is said about it.

Owns the step from a policy's words to a shorter history. Knows nothing of engines or storage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mmserve.prompt import Prompt
from mmserve.request import ImageSegment, Streaming
from mmserve.server.history import Entry, History, Late, StoredImage
from mmserve.session import Line, SessionPolicy, plan_cut, turns

MIN_WINDOW = 32  # text tokens
MESSAGE_TOKENS = 5  # about what a template writes around a message
LABEL_TOKENS = 5  # and around an image
NOT_READY = "The summary was not ready when the conversation went on."


def largest_window(max_model_len: int) -> int:
    """The most text tokens that a policy may ask for; images and answers take the rest."""
    return max_model_len * 3 // 4


@dataclass(frozen=True)
class Budget:
    """What a conversation may hold, in tokens."""

    window: int  # of text
    room: int  # of images

    @classmethod
    def of(cls, policy: SessionPolicy, max_model_len: int) -> Budget:
        window = policy.window or largest_window(max_model_len)
        return cls(window, max_model_len - window)

    def holds(self, text: int, images: int) -> bool:
        return text <= self.window and images <= self.room

    def holds_more(self, text: int, images: int, question: int) -> bool:
        """Whether there is room for another turn, too: for twice a question of so many tokens, or
        an eighth of the window; and for an eighth of the images."""
        more = min(max(2 * question, self.window // 8), self.window // 2)
        return self.holds(text + more, images + self.room // 8)

    def max_images(self, count: int, each: int) -> int:
        """How many of `count` images of `each` tokens may stay, for their room and for labels that
        take a quarter of the window; where these are nearly full, half of that, so that cuts are
        rare."""
        most = self.window // (4 * LABEL_TOKENS)
        if each:
            most = min(most, self.room // each)
        return most // 2 if 8 * count > 7 * most else most


def line(entry: Entry) -> Line:
    """An entry as a cut sees it."""
    item = entry.item
    images = tuple(image.digest for image in item.images)
    tokens = item.tokens + MESSAGE_TOKENS + LABEL_TOKENS * len(images)
    return Line(item.role, tokens, images)


def text_tokens(history: History) -> int:
    """About as many as its prompt has; instructions, tools and a summary come on top."""
    return sum(line(entry).tokens for entry in history.entries) + LABEL_TOKENS * len(history.images)


def num_turns(history: History) -> int:
    return len(turns(_lines(history)))


def _lines(history: History) -> list[Line]:
    """The head, then the entries; those of the request that is being made are one, as they all
    stay."""
    digests = tuple(image.digest for image in history.images)
    old = [line(entry) for entry in history.entries if entry.old]
    new = [line(entry) for entry in history.entries if not entry.old]
    if new:
        images = tuple(digest for each in new for digest in each.images)
        role = new[0].role if new[0].role != "system" else "user"
        old.append(Line(role, sum(each.tokens for each in new), images))
    return [Line("head", LABEL_TOKENS * len(digests), digests), *old]


def cut(history: History, window: int, rest: int = 0, max_images: int | None = None) -> History:
    """Without the oldest turns, see `plan_cut`; the same history where nothing can go."""
    plan = plan_cut(history.state, _lines(history), window=window, rest=rest, max_images=max_images)
    sources = [history.images, *(tuple(entry.item.images) for entry in history.entries)]
    images = tuple(sources[i][k] for i, k in plan.images)
    return _leave(history, plan.first - 1, images)


def trim(history: History, budget: Budget, text: int, images: int) -> History:
    """Cut once its prompt is known to have so many tokens of text and of images."""
    count = len(history.shown)
    limit = budget.max_images(count, images // count if count else 0)
    return cut(history, budget.window, max(0, text - text_tokens(history)), limit)


def in_turn(history: History, prompt: Prompt, max_model_len: int) -> Streaming:
    """How an answer goes on that outgrows its window: within a turn, text may pass it by half.

    What stands before the first turn is kept like the sinks, as far as there is room.
    """
    policy = history.state.policy
    assert policy is not None
    window = Budget.of(policy, max_model_len).window
    system = sum(line(e).tokens for e in history.entries if e.item.role == "system")
    head = max(0, prompt.num_text_tokens - text_tokens(history)) + system
    held = max(window * 3 // 2, prompt.num_text_tokens + window // 2)
    sinks = min(max(policy.sinks, head), held // 4)
    return Streaming(held, sinks, held // 2, _readable(history, prompt))


def _readable(history: History, prompt: Prompt) -> frozenset[bytes] | int | None:
    """The images that a cut inside a turn leaves, in the engine's words."""
    policy, pinned = history.state.policy, history.state.pinned
    assert policy is not None
    if policy.images == "all":
        return None
    if isinstance(policy.images, int) and not pinned:
        return policy.images
    segments = [s.image.digest for s in prompt.segments if isinstance(s, ImageSegment)]
    present = [
        i for i in history.all_images if history.state.forgotten.get(i.digest) != "recompute"
    ]
    newest = policy.images if isinstance(policy.images, int) else 0
    first = len(present) - newest
    pairs = enumerate(zip(present, segments, strict=True))
    return frozenset(digest for n, (i, digest) in pairs if n >= first or i.digest in pinned)


def _leave(history: History, first: int, images: tuple[StoredImage, ...]) -> History:
    """What is left with entries from `first` on, system items, and these images of the others."""
    before = history.entries[:first]
    system = tuple(entry for entry in before if entry.item.role == "system")
    gone = [entry for entry in before if entry.item.role != "system"]
    if not gone and images == history.images:
        return history
    entries = (*system, *history.entries[first:])
    left = replace(history, entries=entries, images=images)
    # Nothing is remembered of forgotten images that are out, or a conversation's state grows.
    present, forgotten = {i.digest for i in left.all_images}, history.state.forgotten
    state = replace(
        history.state,
        forgotten={digest: how for digest, how in forgotten.items() if digest in present},
        dropped=history.state.dropped + len(gone),
        dropped_tokens=history.state.dropped_tokens + sum(entry.item.tokens for entry in gone),
        dropped_images=history.state.dropped_images + len(history.shown) - len(left.shown),
    )
    if not gone or state.policy is None or not state.policy.summary:
        return replace(left, state=state)
    late = None if history.late is None else history.late.text
    state = replace(state, summary=late or state.summary, missing=NOT_READY)
    return replace(left, state=state, late=Late())


def dropped(whole: History, kept: History) -> History:
    """The turns that a cut left out, on the layout that they were seen in."""
    stay = next((entry for entry in kept.entries if entry.item.role != "system"), None)
    first = next((i for i, e in enumerate(whole.entries) if e is stay), len(whole.entries))
    return replace(whole, entries=whole.entries[:first])


def shorter(history: History) -> Iterator[History]:
    """All of it, then without the oldest 1, 2, 4, ... turns and their images, but for pinned ones.
    System items stay, and so does what the request brings.

    Doubling cuts more than needed now and then, so that the prefix stays stable between cuts.
    """
    yield history
    starts = [start - 1 for start in turns(_lines(history))]
    count = 1
    while count < len(starts):
        first = starts[count]
        images = [*history.images, *(i for e in history.entries[:first] for i in e.item.images)]
        yield _leave(history, first, tuple(i for i in images if i.digest in history.state.pinned))
        count = count + 1 if count == len(starts) - 1 else min(2 * count, len(starts) - 1)

"""How far a request got: its tokens, its images, and the pages that hold them. Host state only.

Owns `Sequence`. Knows nothing of tensors, pages' contents or scheduling.

Only text tokens live in the text KV pool, so a text token has a **text index** i (its slot among
the sequence's text pages) and a **position** p (what rotary embedding sees), where p = i + the
spans of the images before it. A visual token has a **visual index**, counted through all images of
its sequence. What a query reads is an interval of text indices and one of visual indices.
"""

from __future__ import annotations

import enum
import hashlib
import math
import sys
from array import array
from collections.abc import Hashable, Mapping

from mmserve import keys
from mmserve.placed import Gap, PlacedImage
from mmserve.regimes import ONE, Course, Regimes
from mmserve.request import ImageInput, ImageSegment, Request, Segment, TextSegment
from mmserve.streaming import cut


def _positions(segments: tuple[Segment, ...]) -> int:
    return sum(s.image.width if isinstance(s, ImageSegment) else len(s.token_ids) for s in segments)


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again; its KV may have been given back
    FINISHED = "finished"


class Sequence:
    """A request's tokens and lengths, and which pages hold them.

    A token whose step is launched and whose value the host has not seen yet is *pending*: it
    stands at the end of `token_ids` as -(row + 1), its row among the tokens that step chooses.

    Invariants: num_computed_tokens <= num_tokens; the pages cover at least the computed tokens, but
    for those that a window has passed (-1); `keys[i]` identifies text token i *and* the images
    directly before it, so equal key prefixes mean equal KV at equal positions; a pending token has
    no key.

    When a streaming sequence is cut, what stays of it is its prompt from then on, laid out from
    position 0. Nothing remembers the earlier layout but the counts of what was said and dropped.
    """

    def __init__(
        self,
        request: Request,
        *,
        in_context: bool = False,
        head: int | None = None,
        whole_prompt: bool = False,
        regimes: Regimes = ONE,
    ) -> None:
        """`in_context`: images see what stands before them, and are known by it, too; with `head`
        only so many of each one's first tokens do, and the rest is as it is by itself.
        `whole_prompt`: all of the prompt sees all of it, so all of it is known by all of it."""
        self.request = request
        self.segments = request.segments  # the prompt's; since a cut, all that stayed
        self.regimes = regimes
        self.in_context = in_context
        self.head = head
        self.whole_prompt = whole_prompt
        self.status = SequenceStatus.WAITING
        self.token_ids: list[int] = []
        self.images: list[PlacedImage] = []
        self.gaps: list[Gap] = []
        # By number of its segment: the first text token that does not see a marked image; None: no
        # text did. What is not here is not decided.
        self.marks: dict[int, int | None] = {}
        self.keys: list[Hashable] = []
        # By digest: images that are read as they are after having been held in another format.
        self.coarse: Mapping[bytes, str] = {}
        self.coarsest: str | None = None  # of the formats that any of it was read in
        self.tables: list[list[int]] = [[]]  # by layer group: text pages, logical to physical
        self.open_pages: dict[int, int] = {}  # by number in the text: pages of the residual
        self.num_computed_tokens = 0  # text tokens whose KV is in the pool
        self.num_pending = 0  # tokens at the end of `token_ids` whose values are not known yet
        self.num_cached_tokens = 0  # text tokens found in the prefix cache at first admission
        self.missing_images: frozenset[bytes] = frozenset()  # keys not found then
        self.seat = math.inf  # its number among those that were admitted
        self.images_ready = False  # all images' KV is written, and they are held
        self.num_dropped_tokens = self.num_dropped_images = 0
        self._num_said = 0  # output tokens before the last cut
        self.course = Course(regimes, _positions(self.segments))
        self._lay_out()
        asked = request.params.max_tokens
        # Text tokens, prompt and output, that it may come to.
        self.token_limit = sys.maxsize if asked is None else self.num_prompt_tokens + asked
        self.window: int | None = None  # text tokens at which it is cut

    def _lay_out(self) -> None:
        """The prompt alone."""
        self.images, self.gaps, self.keys = [], [], []
        self.token_ids.clear()  # others hold the list itself
        # Images that the first generated token, which is always text, is the first to look at.
        self._before_next = self._place(self.segments)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_image_tokens = sum(p.image.num_tokens for p in self.images)
        self._image_width = sum(p.image.width for p in self.images)

    def _place(self, segments: tuple[Segment, ...]) -> list[bytes]:
        """Lay the segments out; the digests of trailing images."""
        position = visual = hashed = 0
        salt = keys.of_prompt(segments) if self.whole_prompt else b""
        salt += self.course.salt(0) + self.request.tenant.salt
        before = [salt] if salt else []
        context = hashlib.sha256(salt)
        for number, segment in enumerate(segments):
            if isinstance(segment, ImageSegment) and segment.marked:
                if self.marks.get(number, 0) is None:
                    continue
                self.gaps.append(Gap(segment.image, number, len(self.token_ids)))
                before.append(segment.image.digest)
                position += segment.image.width
                continue
            if isinstance(segment, ImageSegment):
                image, index = segment.image, len(self.token_ids)
                run = array("q", self.token_ids[hashed:])
                context.update(len(run).to_bytes(8, "little") + run.tobytes() + image.digest)
                hashed = index
                where = (index, position, visual)
                self.images += self._parts(image, where, context.digest())
                before.append(self._named(image.digest, image.digest))
                position += image.width
                visual += image.num_tokens
                continue
            for token in segment.token_ids:
                self.token_ids.append(token)
                self.keys.append((*before, token) if before else token)
                before.clear()
            position += len(segment.token_ids)
        return before

    def _parts(
        self, image: ImageInput, where: tuple[int, int, int], context: bytes
    ) -> list[PlacedImage]:
        """An image as it is stored: in one piece, or its head and its tail apart."""
        alone = self._named(self.course.key(image.digest), image.digest)
        if not self.in_context:
            return [PlacedImage(image, *where, alone)]
        if self.head is None or image.num_tokens <= self.head:
            return [PlacedImage(image, *where, context, in_context=True)]
        head, tail = image.cut(self.head)
        index, position, visual = where
        return [
            PlacedImage(head, *where, keys.of_head(context, self.head), in_context=True),
            PlacedImage(tail, index, position, visual + self.head, alone, skip=self.head),
        ]

    def _named(self, name: bytes, digest: bytes) -> bytes:
        """What a name of an image becomes where the image is not as it was computed."""
        kind = self.coarse.get(digest)
        return name if kind is None else keys.stepped(name, kind)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def num_tokens(self) -> int:
        """Text tokens, prompt and output, pending ones too."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens whose values are known."""
        return self._num_said + len(self.token_ids) - self.num_prompt_tokens - self.num_pending

    @property
    def output_token_ids(self) -> list[int]:
        """Since the last cut."""
        return self.token_ids[self.num_prompt_tokens : len(self.token_ids) - self.num_pending]

    @property
    def images_found(self) -> list[bool]:
        """Of each image, whether nothing of it had to be computed for this request.

        An image that is stored as head and tail is one image: one whose tail was found is still
        a miss if its head had to be computed. Of a missing image shown twice, the second is found.
        """
        found: list[bool] = []
        computed: set[bytes] = set()
        for placed in self.images:
            if not placed.skip:
                found.append(True)
            if placed.key in self.missing_images - computed:
                found[-1] = False
                computed.add(placed.key)
        return found

    @property
    def length(self) -> int:
        """Positions used: text and image tokens."""
        return self.num_tokens + self.num_image_tokens

    @property
    def finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def last_is_pending(self) -> bool:
        """The last token it may have, or has room for, is on its way; nothing is left to compute
        before it has landed."""
        limit = self.token_limit if self.window is None else min(self.token_limit, self.window + 1)
        return self.num_pending > 0 and len(self.token_ids) >= limit

    @property
    def outgrown(self) -> bool:
        """It is time for a cut: there are more known tokens than its window holds."""
        return self.window is not None and len(self.token_ids) - self.num_pending > self.window

    def position(self, text_index: int) -> int:
        """The rotary position of a text token."""
        images, place = self.images, text_index
        if self.gaps:
            place += sum(g.image.width for g in self.gaps if g.text_index <= text_index)
        if not images or text_index >= images[-1].text_index:
            return place + self._image_width
        return place + sum(p.image.width for p in images if p.text_index <= text_index)

    def visual_before(self, text_index: int) -> int:
        """Visual tokens of the images before a text token: its own visual index, so to say."""
        images = self.images
        if not images or text_index >= images[-1].text_index:
            return self.num_image_tokens
        return next(p.visual_index for p in images if p.text_index > text_index)

    def enter(self, regime: int) -> None:
        """All is to be computed again, in another regime; nothing is held."""
        self.course.regime = regime
        self._rename()

    def read_as(self, coarse: Mapping[bytes, str]) -> None:
        """All is to be computed again, with these images, by digest, as they are after having been
        held in these formats, and the others as they were computed; nothing is held."""
        self.coarse = coarse
        self._rename()

    def _rename(self) -> None:
        """What is known of its images stays, whatever they are called now."""
        missing = [placed.key in self.missing_images for placed in self.images]
        self._lay_out_again()
        places = zip(self.images, missing, strict=True)
        self.missing_images = frozenset(placed.key for placed, new in places if new)

    def _lay_out_again(self) -> None:
        """The prompt and what came after it."""
        made = self.token_ids[self.num_prompt_tokens :]
        self._lay_out()
        self.token_ids += made
        for token in self.output_token_ids:
            self._append_key(token)
        for at in {at for at in self.marks.values() if at is not None}:
            gaps = [gap for gap in self.gaps if self.marks.get(gap.segment) == at]
            self.keys = self.keys_unseen(gaps, at)

    # -- marked images --------------------------------------------------------------------------

    @property
    def open_gaps(self) -> list[Gap]:
        """Of which is not decided where text ceases to see them."""
        return [gap for gap in self.gaps if gap.segment not in self.marks]

    def show_marked(self) -> None:
        """Nothing is decided: keys are those of text that saw all marked images."""
        if self.marks:
            self.marks.clear()
            self._lay_out_again()

    def leave_out(self, gaps: list[Gap]) -> None:
        """No text has seen these or was placed behind them."""
        self.marks |= dict.fromkeys(gap.segment for gap in gaps)
        self._lay_out_again()

    def unsee(self, gaps: list[Gap], at: int) -> None:
        """Text from index `at` on does not see these, though it was placed behind them."""
        self.keys = self.keys_unseen(gaps, at)
        self.marks |= dict.fromkeys((gap.segment for gap in gaps), at)

    def keys_unseen(self, gaps: list[Gap], at: int) -> list[Hashable]:
        """What keys would be then."""
        key = self.keys[at]
        names = key if isinstance(key, tuple) else (key,)
        salt = keys.unseen((gap.text_index, gap.image.digest) for gap in gaps)
        return [*self.keys[:at], (salt, *names), *self.keys[at + 1 :]]

    # -- streaming ------------------------------------------------------------------------------

    def bound(self, room: int) -> None:
        """The context and the pools have room for so many text tokens: a streaming sequence is cut
        there at the latest, if that leaves it anything behind its sinks; another ends."""
        streaming = self.request.streaming
        if streaming is None or room < streaming.sinks + 3:
            self.token_limit = min(self.token_limit, room)
        else:
            self.window = min(streaming.window, room - 1)

    def cut(self) -> int:
        """Drop the oldest text. All is to be computed again; nothing is held, nothing is pending.

        The number of tokens dropped.
        """
        streaming, window = self.request.streaming, self.window
        assert streaming is not None and window is not None and not self.num_pending
        fits = streaming.sinks + streaming.keep < window
        keep = streaming.keep if fits else (window - streaming.sinks) // 2
        made = TextSegment(tuple(self.output_token_ids))
        rest = cut((*self.segments, made), streaming, keep)
        self._num_said = self.num_output_tokens
        self.num_dropped_tokens += rest.dropped_tokens
        self.num_dropped_images += rest.dropped_images
        self.token_limit -= rest.dropped_tokens
        self.segments = rest.segments
        self.marks.clear()
        self.course = Course(self.regimes, _positions(self.segments))
        self._lay_out()
        return rest.dropped_tokens

    def split(self, count: int) -> tuple[int, int]:
        """How many text and how many visual tokens are among the sequence's first `count`."""
        text = count
        for placed in self.images:
            before = placed.text_index + placed.visual_index
            if before >= count:
                break
            inside = min(count - before, placed.image.num_tokens)
            text = count - placed.visual_index - inside
        return text, count - text

    def window_start(self, text_index: int, visual_index: int, window: int) -> tuple[int, int]:
        """The first text and the first visual index that a token with these indices reads through
        a window of so many tokens, itself included."""
        return self.split(max(text_index + visual_index + 1 - window, 0))

    def append(self, token_id: int) -> None:
        assert not self.num_pending, "a pending token has to be settled first"
        self.token_ids.append(token_id)
        self._append_key(token_id)

    def append_pending(self, row: int) -> None:
        """The next token is launched: number `row` of those its step chooses."""
        self.token_ids.append(-(row + 1))
        self.num_pending += 1

    def settle(self, token_id: int) -> None:
        """The first pending token turns out to be this one."""
        self.token_ids[-self.num_pending] = token_id
        self.num_pending -= 1
        self._append_key(token_id)

    def drop_pending(self) -> None:
        """Forget tokens launched behind the end.

        The last token that stays then counts as not computed, as if nothing had been launched.
        """
        if self.num_pending:
            del self.token_ids[-self.num_pending :]
            self.num_pending = 0
        if not self.request.prefill_only:
            self.num_computed_tokens = min(self.num_computed_tokens, len(self.token_ids) - 1)

    def _append_key(self, token_id: int) -> None:
        if salt := self.course.salt(self.position(len(self.keys))):
            self._before_next.append(salt)
        self.keys.append((*self._before_next, token_id) if self._before_next else token_id)
        self._before_next = []

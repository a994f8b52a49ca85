"""The proof that a request can ever run: its tokens against the context and every pool.

Owns the refusals and their words, also for ways of streaming that cannot be. Knows nothing of
queues, or of who runs now.
"""

from __future__ import annotations

import sys

from mmserve.errors import ContextLengthExceededError, RequestError
from mmserve.request import ImageSegment, Request
from mmserve.scheduler.holdings import Holdings

# The fields that a client asks by.
STREAMING = "session_policy"
BEAMS = "best_of"


def check_context(request: Request, num_prompt: int, num_image: int, max_model_len: int) -> None:
    """Counts are text and image tokens of the prompt. Raises ContextLengthExceededError."""
    asked = num_prompt + num_image
    share = f"{num_image} of them for images" if num_image else "no images"
    if asked > max_model_len - (0 if request.prefill_only else 1):
        raise ContextLengthExceededError(
            f"The prompt has {asked} tokens ({share}); the context limit is "
            f"{max_model_len}, and one is needed for the answer."
        )


def check_text(holdings: Holdings, num_prompt: int) -> None:
    """Raises ContextLengthExceededError where a pool cannot hold the prompt's text."""
    for group in holdings.text_groups:
        limit = holdings.text_limit(group)
        if limit is not None and num_prompt + 1 > limit:
            raise ContextLengthExceededError(
                f"The prompt has {num_prompt} text tokens; the text KV pool"
                f"{_of_group(holdings, group)} holds {limit}."
            )


def check_beams(holdings: Holdings, request: Request, num_prompt: int, max_num_seqs: int) -> None:
    """Raises ContextLengthExceededError where a pool cannot hold a token of every beam, and
    RequestError for what beams cannot be."""
    beams = request.params.beams
    if beams is None or request.prefill_only:
        return
    if beams.width > max_num_seqs:
        raise RequestError(
            f"{beams.width} beams are asked for; {max_num_seqs} sequences run at once here.",
            param=BEAMS,
        )
    if request.streaming is not None:
        raise RequestError(
            "What is answered by beam search cannot outgrow its context.", param=STREAMING
        )
    limit = beam_limit(holdings, request, num_prompt)
    if num_prompt + 1 > limit:
        raise ContextLengthExceededError(
            f"The prompt has {num_prompt} text tokens; with {beams.width} beams behind it the text "
            f"KV pool holds {limit}."
        )


def beam_limit(holdings: Holdings, request: Request, num_prompt: int) -> int:
    """Text tokens that each beam may come to, if they share only the prompt's whole pages."""
    beams, size = request.params.beams, holdings.page_size
    assert beams is not None
    shared = num_prompt // size
    limits = [sys.maxsize]
    for group in holdings.text_groups:
        pages, needed = holdings.text[group].num_pages, holdings.window_pages(group)
        if needed is None or beams.width * needed > pages:
            limits.append(size * (shared + (pages - shared) // beams.width))
    return min(limits)


def check_images(
    holdings: Holdings, request: Request, *, in_context: bool, head: int | None
) -> None:
    """Raises ContextLengthExceededError where a pool cannot hold the images together."""
    images, pages = request.images, 0
    if head is not None:
        pages = len(images) * holdings.pages_for(head)
    if not in_context or head is not None:  # else the same image is another one at each place
        images = list({image.digest: image for image in images}.values())
    pages += sum(holdings.pages_for(image.num_tokens) for image in images)
    for group in holdings.image_groups:
        if pages > holdings.vision[group].num_pages:
            raise ContextLengthExceededError(
                f"The {len(images)} images need {pages} vision pages; the vision KV pool"
                f"{_of_group(holdings, group)} has {holdings.vision[group].num_pages}."
            )


def check_streaming(request: Request, *, whole_prompts: bool) -> None:
    """Raises RequestError."""
    streaming = request.streaming
    if streaming is None:
        return
    if whole_prompts:
        raise RequestError(
            "All of this model's prompt sees all of it, so a conversation cannot outgrow it.",
            param=STREAMING,
        )
    window, sinks, keep, images = (
        streaming.window,
        streaming.sinks,
        streaming.keep,
        streaming.images,
    )
    if sinks < 0 or keep < 1:
        raise RequestError(
            f"{sinks} sinks and {keep} kept tokens; at least 0 and 1 are needed", param=STREAMING
        )
    if sinks + keep >= window:
        raise RequestError(
            f"{sinks} sinks and {keep} kept tokens leave no room in a window of {window}",
            param=STREAMING,
        )
    if isinstance(images, int) and images < 0:
        raise RequestError(f"{images} images cannot be kept; 0 or more can", param=STREAMING)


def check_marked(request: Request, *, in_context: bool) -> int:
    """Positions that marked images take. Raises RequestError where later images saw them."""
    segments = (s for s in request.segments if isinstance(s, ImageSegment))
    marked = [s.image for s in segments if s.marked]
    if marked and in_context:
        raise RequestError(
            "This model's images see what stands before them, so that one cannot be forgotten by "
            "marking it; what saw it has to be recomputed."
        )
    return sum(image.num_tokens for image in marked)


def _of_group(holdings: Holdings, number: int) -> str:
    if len(holdings.groups) == 1:
        return ""
    window = holdings.groups[number].window
    return f" of layer group {number}" + (f" (a window of {window})" if window else "")

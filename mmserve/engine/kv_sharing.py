"""KV files of a running engine: written, taken in, and what other weights' KV does to answers.

Owns the order of these, and the comparison: the same prompts once behind what came in and once
computed here, under a salt. Knows nothing of HTTP or of a file's form.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from mmserve.errors import KVRefusedError
from mmserve.kvfile.file import write_file
from mmserve.kvfile.header import KVFileError, KVHeader
from mmserve.prompt import Prompt
from mmserve.request import SamplingParams, Tenant, TextSegment

if TYPE_CHECKING:
    from mmserve.engine.async_engine import AsyncEngine

PROMPTS = 8  # that are compared
LONGEST = 4096  # of them, text tokens
BEST = 20  # tokens whose log-probabilities are
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, logprobs=BEST, ignore_eos=True)


def check_whole(engine: AsyncEngine) -> None:
    """Raises KVRefusedError where several ranks share the heads."""
    if (ranks := engine.engine.runner.team.ranks) > 1:
        raise KVRefusedError(
            f"KV files hold all heads; here each of {ranks} ranks has a part of them."
        )


async def export_kv(engine: AsyncEngine, path: Path) -> None:
    check_whole(engine)
    file = await engine.call(engine.engine.collect_kv)
    try:
        await asyncio.to_thread(write_file, path, file)
    except (KVFileError, OSError) as error:
        raise KVRefusedError(f"The KV could not be written: {error}") from error


async def import_kv(engine: AsyncEngine, path: Path) -> dict[str, Any]:
    """Of text tokens and of images: what is new, was known, found no room. Of other weights' KV,
    declared compatible, also how far answers behind it are from this model's own."""
    check_whole(engine)
    try:
        file = await asyncio.to_thread(engine.engine.read_kv, path)
    except (KVFileError, OSError) as error:
        raise KVRefusedError(f"The KV file is refused: {error}", param="file") from error
    placed = await engine.call(partial(engine.engine.kv.put, file))
    told: dict[str, Any] = {name: part._asdict() for name, part in placed._asdict().items()}
    if engine.engine.kv.is_foreign(file.header):
        told["divergence"] = (await measure(engine, file.header))._asdict()
    return told


class Divergence(NamedTuple):
    """`nats`: the mean over prompts of the divergence of the next token's distribution from this
    model's own, over those of its best tokens that are among both's best."""

    prompts: int
    same_first_token: int
    nats: float | None


async def measure(engine: AsyncEngine, header: KVHeader) -> Divergence:
    """Over beginnings of the file's longest text."""
    tokens = longest_text(header)[: min(LONGEST, engine.engine.max_model_len - 1)]
    page = header.identity.page_size
    ends = sorted({len(tokens) * i // PROMPTS // page * page for i in range(1, PROMPTS + 1)})
    pairs = []
    for end in (end for end in ends if end):
        prompt = tokens[:end]
        pairs.append((await _next(engine, prompt, b"own"), await _next(engine, prompt, b"")))
    same = sum(own[0] == theirs[0] for own, theirs in pairs)
    nats = [_nats(own[1], theirs[1]) for own, theirs in pairs]
    return Divergence(len(pairs), same, sum(nats) / len(nats) if nats else None)


def longest_text(header: KVHeader) -> list[int]:
    """The longest run of tokens from a start in which no image stands."""
    texts: list[list[int]] = []
    for run in header.runs:
        before = [] if run.parent is None else texts[run.parent]
        whole = not run.marks and (run.parent is None or bool(before))
        texts.append([*before, *run.tokens] if whole else [])
    return max(texts, key=len, default=[])


async def _next(
    engine: AsyncEngine, tokens: Sequence[int], salt: bytes
) -> tuple[int, dict[int, float]]:
    """The best next token, and the log-probabilities of the best ones."""
    prompt = Prompt((TextSegment(tuple(tokens)),), len(tokens), 0)
    found: tuple[int, dict[int, float]] = (-1, {})
    tenant = Tenant(salt=salt)
    async for event in engine.submit(f"compare-{uuid4()}", prompt, ONE_TOKEN, tenant=tenant):
        for logprob in event.logprobs:
            found = logprob.token_id, {token: value for token, _, value in logprob.top}
    return found


def _nats(own: dict[int, float], theirs: dict[int, float]) -> float:
    return sum(math.exp(own[t]) * (own[t] - theirs[t]) for t in own.keys() & theirs.keys())

"""What a request may ask of the sampler.

Owns the limits and the words of refusals. Knows nothing of logits.
"""

from __future__ import annotations

import math

from mmserve.errors import RequestError
from mmserve.request import SamplingParams

MAX_STOP_STRINGS = 4
MAX_STOP_LENGTH = 1024  # characters; looking for one costs its length at every token
MAX_LOGPROBS = 20
MAX_BEAMS = 16
MAX_BEAM_STOPS = 16  # tokens; so many times more continuations have to be looked at


def validate(params: SamplingParams, vocab_size: int) -> None:
    """Raises `RequestError`, naming the field and its limits, for a value out of range."""
    p = params
    # Written so that NaN, which compares false, is refused too.
    limits = [
        ("temperature", 0 <= p.temperature <= 2, p.temperature, "between 0 and 2"),
        ("top_p", 0 < p.top_p <= 1, p.top_p, "above 0 and at most 1"),
        ("top_k", p.top_k >= 0, p.top_k, "0 (off) or more"),
        ("min_p", 0 <= p.min_p <= 1, p.min_p, "between 0 and 1"),
        ("presence_penalty", -2 <= p.presence_penalty <= 2, p.presence_penalty, "-2 to 2"),
        ("frequency_penalty", -2 <= p.frequency_penalty <= 2, p.frequency_penalty, "-2 to 2"),
        (
            "repetition_penalty",
            0 < p.repetition_penalty <= 10,
            p.repetition_penalty,
            "above 0 and at most 10",
        ),
        ("max_tokens", p.max_tokens is None or p.max_tokens >= 1, p.max_tokens, "1 or more"),
        (
            "logprobs",
            p.logprobs is None or 0 <= p.logprobs <= MAX_LOGPROBS,
            p.logprobs,
            f"between 0 and {MAX_LOGPROBS}",
        ),
        ("seed", p.seed is None or -(2**63) <= p.seed < 2**63, p.seed, "a 64-bit integer"),
    ]
    for name, good, value, limit in limits:
        if not good:
            raise RequestError(f"{name} is {value}; it must be {limit}", param=name)
    _validate_stop(p)
    _validate_beams(p)
    for token in p.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"stop_token_ids has {token}; ids are 0 to {vocab_size - 1}", param="stop_token_ids"
            )
    for token, bias in p.logit_bias.items():
        if not 0 <= token < vocab_size or not -100 <= bias <= 100:
            raise RequestError(
                f"logit_bias has {token}: {bias}; ids are 0 to {vocab_size - 1}, values -100 to "
                "100",
                param="logit_bias",
            )


def _validate_stop(params: SamplingParams) -> None:
    if len(params.stop) > MAX_STOP_STRINGS:
        raise RequestError(
            f"stop has {len(params.stop)} strings; at most {MAX_STOP_STRINGS} are allowed",
            param="stop",
        )
    for stop in params.stop:
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise RequestError(
                f"stop has a string of {len(stop)} characters; 1 to {MAX_STOP_LENGTH} are allowed",
                param="stop",
            )


def _validate_beams(params: SamplingParams) -> None:
    """Beam search follows the likeliest answers: what draws, or says that others are likelier, has
    no meaning beside it."""
    p, beams = params, params.beams
    if beams is None:
        return
    width, groups, penalty = beams.width, beams.groups, beams.diversity_penalty
    limits = [
        ("best_of", 1 <= width <= MAX_BEAMS, width, f"between 1 and {MAX_BEAMS} beams"),
        ("n", 1 <= beams.count <= width, beams.count, f"between 1 and the {width} beams"),
        (
            "num_beam_groups",
            groups >= 1 and width % groups == 0,
            groups,
            f"a divisor of the {width} beams",
        ),
        (
            "diversity_penalty",
            0 <= penalty <= 100 and (not penalty or groups > 1),
            penalty,
            "between 0 and 100, and 0 where all beams are one group",
        ),
        (
            "length_penalty",
            math.isfinite(beams.length_penalty) and abs(beams.length_penalty) <= 10,
            beams.length_penalty,
            "between -10 and 10",
        ),
        ("temperature", p.temperature == 0, p.temperature, "0"),
        ("top_p", p.top_p == 1, p.top_p, "1"),
        ("top_k", p.top_k == 0, p.top_k, "0"),
        ("min_p", p.min_p == 0, p.min_p, "0"),
        ("repetition_penalty", p.repetition_penalty == 1, p.repetition_penalty, "1"),
        ("presence_penalty", p.presence_penalty == 0, p.presence_penalty, "0"),
        ("frequency_penalty", p.frequency_penalty == 0, p.frequency_penalty, "0"),
        ("logit_bias", not p.logit_bias, p.logit_bias, "empty"),
        (
            "stop_token_ids",
            len(p.stop_token_ids) <= MAX_BEAM_STOPS,
            p.stop_token_ids,
            f"at most {MAX_BEAM_STOPS}",
        ),
    ]
    for name, good, value, limit in limits:
        if not good:
            raise RequestError(f"{name} is {value}; with beam search it is {limit}", param=name)

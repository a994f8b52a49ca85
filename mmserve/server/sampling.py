"""Sampling fields of both text surfaces, and the refusals they share.

Owns the mapping from JSON names to `SamplingParams`. Knows nothing of messages or transports.
"""

from __future__ import annotations

from typing import Any

from mmserve.errors import RequestError
from mmserve.request import BeamParams, Constraint, SamplingParams
from mmserve.server.engine_face import ModelInfo
from mmserve.server.errors import NotFoundError, UnsupportedParameterError
from mmserve.server.fields import Fields, as_list, as_text, wrong_type

MAX_INT = 2**31 - 1
MAX_STOPS = 4
MAX_TOP_LOGPROBS = 20
MAX_BEAMS = 16

# What a number may be, from and to.
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 10),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "diversity_penalty": (0, 100),
    "length_penalty": (-10, 10),
}
WHOLE_RANGES: dict[str, tuple[int, int]] = {
    "top_k": (-1, MAX_INT),
    "seed": (-(2**63), 2**63 - 1),
    "n": (1, MAX_BEAMS),
    "best_of": (1, MAX_BEAMS),
    "num_beam_groups": (1, MAX_BEAMS),
    "top_logprobs": (0, MAX_TOP_LOGPROBS),
}
MAX_BIAS = 100  # of a token, either way
BEAMS = SamplingParams(temperature=0.0)  # nothing is drawn, whatever the model's own settings say


def check_model(fields: Fields, info: ModelInfo) -> None:
    """An absent `model` means the served one; any other name is refused."""
    name = fields.text("model")
    if name is not None and name != info.name:
        raise NotFoundError(
            f"The model '{name[:200]}' does not exist; this server has '{info.name}'.",
            param="model",
            code="model_not_found",
        )


def _max_tokens(fields: Fields, names: tuple[str, ...]) -> int | None:
    wanted = [limit for name in names if (limit := fields.integer(name, -1, MAX_INT)) is not None]
    if 0 in wanted:
        param = fields.param(next(name for name in names if fields.get(name) == 0))
        raise RequestError(f"'{param}' must be 1 or more, or -1 for no limit.", param=param)
    return wanted[0] if wanted and wanted[0] > 0 else None


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    if value is None:
        return ()
    param = fields.param("stop")
    stops = [value] if isinstance(value, str) else as_list(value, param)
    if len(stops) > MAX_STOPS:
        raise RequestError(f"'{param}' may hold {MAX_STOPS} strings.", param=param)
    texts = tuple(as_text(stop, param) for stop in stops)
    if not all(texts):
        raise RequestError(f"'{param}' may not hold an empty string.", param=param)
    return texts


def _logit_bias(fields: Fields) -> dict[int, float]:
    bias: dict[int, float] = {}
    pairs = fields.object("logit_bias")
    for key in pairs.values:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise RequestError("'logit_bias' keys are token ids.", param="logit_bias")
        value = pairs.number(key, -MAX_BIAS, MAX_BIAS)
        if value is not None:
            bias[int(key)] = value
    return bias


def _token_ids(fields: Fields, name: str) -> tuple[int, ...]:
    ids = fields.list(name)
    for value in ids:
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(value, "an array of integers", fields.param(name))
    return tuple(ids)


def _number(fields: Fields, name: str, default: float) -> float:
    value = fields.number(name, *RANGES[name])
    return default if value is None else value


def whole(fields: Fields, name: str) -> int | None:
    return fields.integer(name, *WHOLE_RANGES[name])


def parse_sampling(
    fields: Fields,
    info: ModelInfo,
    *,
    limits: tuple[str, ...],
    logprobs: int | None,
    constraint: Constraint | None = None,
    beams: BeamParams | None = None,
) -> SamplingParams:
    """`limits` names the length fields, the stronger first; the rest was read by the surface."""
    top_k = whole(fields, "top_k")
    default = info.default_sampling if beams is None else BEAMS
    return SamplingParams(
        max_tokens=_max_tokens(fields, limits),
        temperature=_number(fields, "temperature", default.temperature),
        top_p=_number(fields, "top_p", default.top_p),
        top_k=default.top_k if top_k is None else max(top_k, 0),
        min_p=_number(fields, "min_p", default.min_p),
        repetition_penalty=_number(fields, "repetition_penalty", default.repetition_penalty),
        presence_penalty=_number(fields, "presence_penalty", 0.0),
        frequency_penalty=_number(fields, "frequency_penalty", 0.0),
        logit_bias=_logit_bias(fields),
        seed=whole(fields, "seed"),
        stop=_stops(fields),
        stop_token_ids=_token_ids(fields, "stop_token_ids"),
        ignore_eos=fields.flag("ignore_eos"),
        logprobs=logprobs,
        constraint=constraint,
        beams=beams,
    )


def parse_beams(fields: Fields) -> BeamParams | None:
    """vLLM's words: `n` answers of `best_of` beams (default: n). Groups are ours. None where one
    answer is asked for, token by token."""
    count, width, groups = (whole(fields, name) for name in ("n", "best_of", "num_beam_groups"))
    early: Any = fields.get("early_stopping")
    beams = BeamParams(
        width=width or count or 1,
        count=count or 1,
        groups=groups or 1,
        diversity_penalty=_number(fields, "diversity_penalty", 0.0),
        length_penalty=_number(fields, "length_penalty", 1.0),
        early_stopping="never" if early == "never" else fields.flag("early_stopping"),
    )
    if fields.flag("use_beam_search"):
        return beams
    for name in ("n", "best_of"):
        if fields.get(name) not in (None, 1):
            raise UnsupportedParameterError(
                "One answer a request is made here.", param=fields.param(name)
            )
    for name in ("num_beam_groups", "diversity_penalty"):
        if fields.get(name) is not None:
            param = fields.param(name)
            raise RequestError(f"'{param}' needs 'use_beam_search': true.", param=param)
    return None


def unsupported(fields: Fields, *names: str) -> None:
    """Refuse fields whose silent loss would change the answer."""
    for name in names:
        value = fields.get(name)
        if value is not None and value is not False and value != [] and value != {}:
            raise UnsupportedParameterError(
                f"'{fields.param(name)}' is not supported here.", param=fields.param(name)
            )


def text_only(fields: Fields) -> None:
    """Refuse audio and other output kinds."""
    for kind in fields.list("modalities"):
        if kind != "text":
            raise UnsupportedParameterError(
                "This model answers with text only.", param=fields.param("modalities")
            )
    unsupported(fields, "audio")

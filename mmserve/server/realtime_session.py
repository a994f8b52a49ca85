"""What a Realtime session is set to, and what one of its responses is asked for.

Owns the fields of `session.update` and `response.create`. Knows nothing of items' places, prompts
or sockets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmserve.errors import RequestError
from mmserve.request import SamplingParams
from mmserve.server.calling import Calling, parse_calling
from mmserve.server.engine_face import ModelInfo
from mmserve.server.errors import UnsupportedParameterError
from mmserve.server.fields import Fields, as_list, as_object
from mmserve.server.formats import Format, constrain
from mmserve.server.responses_request import InputItem, parse_item
from mmserve.server.sampling import check_model, parse_sampling, unsupported
from mmserve.server.wire import new_id

# What a session keeps and a response may override; the last two rows are not OpenAI's.
SETTINGS = (
    *("instructions", "output_modalities", "max_output_tokens", "truncation"),
    *("tools", "tool_choice", "parallel_tool_calls"),
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "logit_bias", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids"),
)
RETAINED = 0.8  # of the room, where the client does not say: so that cuts are rare


class UnsupportedModalityError(RequestError):
    code = "unsupported_modality"


@dataclass(frozen=True)
class Settings:
    """Checked settings. `retention`: what share of the room stays after a truncation; None: the
    oldest items are never left out."""

    params: SamplingParams
    calling: Calling
    instructions: str | None
    retention: float | None


@dataclass(frozen=True)
class ResponseWish:
    """A checked `response.create`. `input`: instead of the conversation. `writes`: the answer
    becomes part of it."""

    settings: Settings
    input: tuple[InputItem, ...] | None
    writes: bool
    metadata: dict[str, str]


def _check_modalities(fields: Fields) -> None:
    for kind in fields.list("output_modalities"):
        if kind != "text":
            raise UnsupportedModalityError(
                "This model answers with text only.", param=fields.param("output_modalities")
            )


def _retention(fields: Fields) -> float | None:
    value = fields.get("truncation")
    if value in (None, "auto"):
        return RETAINED
    if value == "disabled":
        return None
    param = fields.param("truncation")
    inner = Fields(as_object(value, param), param)
    inner.choice("type", ("retention_ratio",), "retention_ratio")
    unsupported(inner, "token_limits")
    inner.required("retention_ratio")
    return inner.number("retention_ratio", 0, 1)


def parse_settings(fields: Fields, info: ModelInfo) -> Settings:
    """Raises `RequestError`s that name the field."""
    _check_modalities(fields)
    unsupported(fields, "prompt")
    calling = parse_calling(fields, info, formatted=False)
    if fields.get("max_output_tokens") == "inf":
        fields = Fields({**fields.values, "max_output_tokens": None}, fields.path)
    params = parse_sampling(
        fields,
        info,
        limits=("max_output_tokens",),
        logprobs=None,
        constraint=constrain(Format(), calling),
    )
    return Settings(params, calling, fields.text("instructions"), _retention(fields))


class RealtimeConfig:
    """The settings of one session, as they were given last."""

    def __init__(self, info: ModelInfo) -> None:
        self.id = new_id("sess")
        self._info = info
        self._values: dict[str, Any] = {}
        self._settings = parse_settings(Fields({}), info)

    def update(self, fields: Fields) -> None:
        """Take what a `session.update` brings; nothing of a refused one."""
        kind = fields.required("type")
        if kind != "realtime":
            raise UnsupportedParameterError(
                f"Sessions of type '{str(kind)[:100]}' are not supported.",
                param=fields.param("type"),
            )
        if fields.text("model") not in (None, self._info.name):
            raise RequestError("The model of a session cannot change.", param=fields.param("model"))
        values = self._values | {k: v for k, v in fields.values.items() if k in SETTINGS}
        asked = Fields({**values, "prompt": fields.get("prompt")}, fields.path)
        self._settings, self._values = parse_settings(asked, self._info), values

    @property
    def settings(self) -> Settings:
        return self._settings

    def to_json(self) -> dict[str, Any]:
        """All effective settings."""
        settings, params = self._settings, self._settings.params
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": self.id,
            "model": self._info.name,
            "output_modalities": ["text"],
            "instructions": settings.instructions or "",
            "max_output_tokens": params.max_tokens or "inf",
            "tools": list(settings.calling.tools_json),
            "tool_choice": settings.calling.choice_json,
            "parallel_tool_calls": settings.calling.parallel,
            "truncation": self._values.get("truncation") or "auto",
            "temperature": params.temperature,
            "top_p": params.top_p,
        }

    def wish(self, fields: Fields, conversation_id: str) -> ResponseWish:
        """What a `response.create` asks for; its settings go before the session's."""
        check_model(fields, self._info)
        where = fields.text("conversation") or "auto"
        if where not in ("auto", "none", conversation_id):
            raise RequestError(
                "'response.conversation' must be auto or none.", param=fields.param("conversation")
            )
        own = {k: v for k, v in fields.values.items() if k in SETTINGS or k == "prompt"}
        settings = self._settings
        if own:
            settings = parse_settings(Fields({**self._values, **own}, fields.path), self._info)
        input: tuple[InputItem, ...] | None = None
        if fields.get("input") is not None:
            param = fields.param("input")
            values = as_list(fields.get("input"), param)
            parsed = [parse_item(v, f"{param}[{i}]", self._info) for i, v in enumerate(values)]
            input = tuple(item for item in parsed if item is not None)
        return ResponseWish(settings, input, where != "none", fields.metadata())

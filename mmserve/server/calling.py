"""Function tools of a request: which the model is told of, which it may call and whether it must.

Owns `tools`, `tool_choice` and `parallel_tool_calls` of both text surfaces. Knows nothing of how
calls are written or read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mmserve.errors import RequestError
from mmserve.server.engine_face import ModelInfo
from mmserve.server.errors import MissingParameterError, UnsupportedParameterError
from mmserve.server.fields import Fields, as_object, as_text
from mmserve.tools import CallParser, Tool, ToolFormat

MAX_TOOLS = 128
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Calling:
    """`shown` is what the model is told of, `callable` what it may call now. `formatted`: what is
    no call has a form of its own. `tools_json` and `choice_json`: as a Response repeats them."""

    shown: tuple[Tool, ...] = ()
    callable: tuple[Tool, ...] = ()
    required: bool = False
    parallel: bool = True
    formatted: bool = False
    format: ToolFormat | None = None
    tools_json: tuple[Any, ...] = ()
    choice_json: Any = "auto"

    @property
    def described(self) -> tuple[dict[str, Any], ...]:
        return tuple(tool.described() for tool in self.shown)

    def parser(self) -> CallParser | None:
        """What reads the answer; None where no call can be in it."""
        if not self.callable or self.format is None:
            return None
        return self.format.parser(leading=self.formatted)


def call_text(info: ModelInfo, name: str, arguments: str) -> str:
    """An earlier call as the model wrote it, or as one is shown to a model that makes none."""
    written = info.tool_format.call(name, arguments) if info.tool_format else None
    return written or f"{name}({arguments})"


def _tool(value: Any, param: str) -> Tool:
    outer = Fields(as_object(value, param), param)
    kind = outer.required("type")
    if kind != "function":
        raise UnsupportedParameterError(
            f"Only function tools are called here, not '{str(kind)[:100]}'.",
            param=outer.param("type"),
        )
    # Chat Completions has a level more than Responses; each surface takes both.
    inner = outer.object("function") if outer.get("function") is not None else outer
    name = as_text(inner.required("name"), inner.param("name"))
    if not NAME.fullmatch(name):
        raise RequestError(
            "A function's name is 1 to 64 letters, digits, '_', '-' and '.'.",
            param=inner.param("name"),
        )
    parameters = inner.object("parameters").values or NO_PARAMETERS
    if parameters.get("type", "object") != "object":
        raise RequestError(
            "A function's parameters are a JSON schema of type 'object'.",
            param=inner.param("parameters.type"),
        )
    parameters = {"type": "object", **parameters}
    return Tool(name, inner.text("description"), parameters, inner.flag("strict"))


def _named(tools: tuple[Tool, ...], value: Any, param: str) -> Tool:
    outer = Fields(as_object(value, param), param)
    inner = outer.object("function") if outer.get("function") is not None else outer
    name = as_text(inner.required("name"), inner.param("name"))
    for tool in tools:
        if tool.name == name:
            return tool
    raise RequestError(
        f"'{param}' names no function of 'tools': '{name[:100]}'.", param=inner.param("name")
    )


def _chosen(choice: Any, tools: tuple[Tool, ...], param: str) -> tuple[tuple[Tool, ...], str]:
    """The functions that may be called, and the mode: none, auto, required or named."""
    if choice in (None, "auto"):
        return tools, "auto"
    if choice == "none":
        return (), "none"
    if choice == "required":
        return tools, "required"
    fields = Fields(as_object(choice, param), param)
    kind = fields.get("type")
    if kind == "allowed_tools":
        inner = fields.object("allowed_tools") if fields.get("allowed_tools") else fields
        mode = inner.choice("mode", ("auto", "required"), "auto")
        names = inner.list("tools")
        allowed = [_named(tools, v, f"{inner.param('tools')}[{i}]") for i, v in enumerate(names)]
        if not allowed:
            raise MissingParameterError("No tool is allowed.", param=inner.param("tools"))
        return tuple(allowed), mode
    if kind != "function":
        raise UnsupportedParameterError(
            "'tool_choice' is none, auto, required, a function or allowed_tools.", param=param
        )
    return (_named(tools, choice, param),), "named"


def parse_calling(fields: Fields, info: ModelInfo, *, formatted: bool) -> Calling:
    """`formatted`: the request asks for an output format, too. Raises `RequestError`s that name
    the field."""
    if fields.get("function_call") not in (None, "none", "auto"):
        raise UnsupportedParameterError(
            "'function_call' is not supported; use 'tool_choice'.", param="function_call"
        )
    values = fields.list("tools")
    param = fields.param("tool_choice")
    if len(values) > MAX_TOOLS:
        raise RequestError(f"'tools' may hold {MAX_TOOLS} functions.", param="tools")
    tools = tuple(_tool(v, f"{fields.param('tools')}[{i}]") for i, v in enumerate(values))
    names = [tool.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise RequestError(
                f"Two functions are called '{name}'.", param=f"{fields.param('tools')}[{i}]"
            )
    choice = fields.get("tool_choice")
    callable, mode = _chosen(choice, tools, param)
    parallel = fields.flag("parallel_tool_calls", True)
    if not tools:
        if mode in ("required", "named"):
            raise RequestError(f"'{param}' needs 'tools'.", param=param)
        return Calling()
    if info.tool_format is None:
        raise UnsupportedParameterError("This model cannot be told of tools.", param="tools")
    return Calling(
        shown=() if mode == "none" else tools,
        callable=callable,
        required=mode in ("required", "named"),
        parallel=parallel and mode != "named",
        formatted=formatted,
        format=info.tool_format,
        tools_json=tuple(_echo(tool) for tool in tools),
        choice_json=choice or "auto",
    )


def _echo(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description}
    return {
        "type": "function",
        **function,
        "parameters": dict(tool.parameters),
        "strict": tool.strict,
    }

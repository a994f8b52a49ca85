"""Function tools: how a model is told of them, how it calls them, and how its calls are read.

Owns `Tool` and `ToolFormat`, one per way of writing calls; `HERMES` is the one that ChatML models
are trained on. Knows nothing of HTTP, tokens or how a grammar is compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

# How constrained JSON is written: as Python's `json.dumps` does, which is what models have read
# most. Free white space would let a small model go on with it for ever.
JSON_STYLE: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
MAX_CALLS = 16  # in one answer


@dataclass(frozen=True)
class Tool:
    """A function a model may call. `parameters`: a JSON schema of an object."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    strict: bool = False

    def described(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = {"name": self.name, "description": self.description}
        function = {name: value for name, value in function.items() if value}
        return {"type": "function", "function": {**function, "parameters": dict(self.parameters)}}


class Piece(NamedTuple):
    """A stretch of an answer: plain text, the beginning of a call (`text` is the function's name),
    more of its arguments (JSON), or its end."""

    kind: Literal["text", "call", "arguments", "end"]
    text: str = ""


class CallParser(Protocol):
    """Reads one answer as it comes. All pieces do not depend on how the text was split."""

    def push(self, text: str) -> list[Piece]: ...
    def flush(self) -> list[Piece]:
        """What was held back, once the answer has ended."""


class ToolFormat(Protocol):
    """One family's way of writing tools and calls."""

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """What a system message says of tools, each as `Tool.described` gives it."""

    def call(self, name: str, arguments: str) -> str:
        """An earlier call, as the model itself would have written it."""

    def result(self) -> tuple[str, str]:
        """What stands around a tool's answer."""

    def grammar(
        self, tools: Sequence[Tool], *, required: bool, parallel: bool, content: str | None = None
    ) -> str:
        """A Lark grammar of answers that may (`required`: must) call these tools.

        `content`: a Lark expression of what may be said instead; None: any text, calls after it.
        """

    def parser(self, *, leading: bool) -> CallParser:
        """`leading`: a call is one only at the very beginning, for answers of a given form."""


def json_rule(schema: Mapping[str, Any], *, lenient: bool) -> str:
    """A JSON schema as a Lark expression."""
    return f"%json {json.dumps({**schema, 'x-guidance': {**JSON_STYLE, 'lenient': lenient}})}"


_HERMES = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class Hermes:
    """`<tool_call>`, newline, `{"name": ..., "arguments": {...}}`, newline, `</tool_call>`."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return _HERMES.format(tools=lines)

    def call(self, name: str, arguments: str) -> str:
        head = f'{{"name": {json.dumps(name)}, "arguments": '
        return f"{self.OPEN}\n{head}{arguments or '{}'}}}\n{self.CLOSE}"

    def result(self) -> tuple[str, str]:
        return "<tool_response>\n", "\n</tool_response>"

    def grammar(
        self, tools: Sequence[Tool], *, required: bool, parallel: bool, content: str | None = None
    ) -> str:
        quote = json.dumps
        again = quote("\n" + self.OPEN)
        more = f" ({again} call){{0,{MAX_CALLS - 1}}}" if parallel else ""
        first = quote(self.OPEN)
        lines = ["%llguidance {}"]
        if required:
            lines.append(f"start: {first} call{more}")
        elif content is not None:
            lines += [f"start: content | {first} call{more}", f"content: {content}"]
        else:
            # The lead is lazy: it ends with the first opening tag, and text cannot hold one.
            lines += [f"start: TEXT | lead call{more}", f"lead[lazy]: TEXT {first}"]
            lines.append(r"TEXT: /(.|\n)*/")
        choices = " | ".join(f"call_{i}" for i in range(len(tools)))
        head, tail = quote('\n{"name": '), quote("}\n" + self.CLOSE)
        lines.append(f"call: {head} ({choices}) {tail}")
        for i, tool in enumerate(tools):
            name = quote(f'{quote(tool.name)}, "arguments": ')
            schema = json_rule(tool.parameters, lenient=not tool.strict)
            lines += [f"call_{i}: {name} args_{i}", f"args_{i}: {schema}"]
        return "\n".join(lines) + "\n"

    def parser(self, *, leading: bool) -> CallParser:
        return _HermesParser(leading)


class _HermesParser:
    """Text until an opening tag; then calls and nothing else."""

    _HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"arguments"\s*:\s*(?=\S)')

    def __init__(self, leading: bool) -> None:
        self._leading = leading
        self._state = self._text
        self._held = ""
        self._called = False
        self._scan = _ObjectScan()

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._state(pieces):
            pass
        return pieces

    def flush(self) -> list[Piece]:
        held, self._held = self._held, ""
        is_text = self._state == self._text and not self._called
        return [Piece("text", held)] if held and is_text else []

    # Each takes what it can from what is held; True when the next state goes on.

    def _text(self, pieces: list[Piece]) -> bool:
        before, tag, after = self._held.partition(Hermes.OPEN)
        anywhere = not self._leading or not before.strip()
        if tag and anywhere:
            if before.rstrip() and not self._called:
                pieces.append(Piece("text", before.rstrip()))
            self._held, self._state = after, self._head
            return True
        end = len(self._held) if self._called else self._sendable()
        if end and not self._called:
            pieces.append(Piece("text", self._held[:end]))
            self._held = self._held[end:]
            if self._leading:
                self._state = self._plain
                return True
        return False

    def _plain(self, pieces: list[Piece]) -> bool:
        if self._held:
            pieces.append(Piece("text", self._held))
            self._held = ""
        return False

    def _sendable(self) -> int:
        """How much of what is held neither begins a tag nor is white space that may precede one."""
        tag, held = Hermes.OPEN, self._held
        partial = next((n for n in range(len(tag) - 1, 0, -1) if held.endswith(tag[:n])), 0)
        return len(held[: len(held) - partial].rstrip())

    def _head(self, pieces: list[Piece]) -> bool:
        found = self._HEAD.match(self._held)
        if found is None:
            return False
        pieces.append(Piece("call", found[1]))
        self._held, self._state = self._held[found.end() :], self._arguments
        self._called, self._scan = True, _ObjectScan()
        return True

    def _arguments(self, pieces: list[Piece]) -> bool:
        end = self._scan.push(self._held)
        taken = self._held if end is None else self._held[:end]
        if taken:
            pieces.append(Piece("arguments", taken))
        self._held = self._held[len(taken) :]
        if end is None:
            return False
        pieces.append(Piece("end"))
        self._state = self._close
        return True

    def _close(self, pieces: list[Piece]) -> bool:
        _, tag, after = self._held.partition(Hermes.CLOSE)
        if not tag:
            return False
        self._held, self._state = after, self._text
        return True


class _ObjectScan:
    """Finds where a JSON object ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def push(self, text: str) -> int | None:
        """The index behind the object's end, once it is in this text."""
        for i, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    return i + 1
        return None


HERMES: ToolFormat = Hermes()

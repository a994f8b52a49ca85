"""What form an answer was asked for: text formats, vLLM's extra fields, and the calls of tools.

Owns the mapping from those JSON words to a `Constraint`. Knows nothing of how one is enforced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmserve.errors import RequestError
from mmserve.request import Constraint
from mmserve.server.calling import Calling
from mmserve.server.errors import UnsupportedParameterError
from mmserve.server.fields import Fields, as_list, as_object, as_text, wrong_type
from mmserve.tools import json_rule

KINDS = ("text", "json_object", "json_schema")
WORDS = ("json", "regex", "choice", "grammar", "json_object")  # of vLLM's `structured_outputs`
NOT_HERE = ("structural_tag", "whitespace_pattern", "disable_additional_properties")
OLD_WORDS = {"json": "guided_json", "regex": "guided_regex", "choice": "guided_choice"} | {
    "grammar": "guided_grammar"
}


@dataclass(frozen=True)
class Format:
    """`echo`: what a Response repeats; None: plain text. `schema`: of a JSON constraint."""

    echo: Mapping[str, Any] | None = None
    constraint: Constraint | None = None
    schema: Mapping[str, Any] | None = None


def parse_format(fields: Fields, asked: Fields, name: str) -> Format:
    """`asked.name` is the surface's own field (Chat nests the schema); vLLM's stand in `fields`.

    Raises `RequestError`s that name the field.
    """
    found = [_standard(asked.object(name)), *_extras(fields)]
    wanted = [one for one in found if one.constraint is not None]
    if len(wanted) > 1:
        first, second = (one.constraint.param for one in wanted[:2] if one.constraint)
        raise RequestError(f"'{second}' excludes '{first}': an answer has one form.", param=second)
    return wanted[0] if wanted else found[0]


def _standard(asked: Fields) -> Format:
    kind = asked.choice("type", KINDS, "text")
    if kind == "text":
        return Format()
    if kind == "json_object":
        return _json({"type": "object"}, asked.path, echo={"type": kind})
    inner = asked.object("json_schema") if asked.get("json_schema") is not None else asked
    param = inner.param("schema")
    schema = as_object(inner.required("schema"), param)
    strict = inner.flag("strict")
    echo: dict[str, Any] = {"type": kind, "name": inner.text("name") or "answer"}
    echo |= {"schema": schema, "strict": strict, "description": inner.text("description")}
    return _json(schema, param, strict=strict, echo=echo)


def _json(
    schema: Mapping[str, Any],
    param: str,
    *,
    strict: bool = True,
    echo: Mapping[str, Any] | None = None,
) -> Format:
    text = json.dumps(schema, ensure_ascii=False)
    return Format(echo, Constraint("schema", text, lenient=not strict, param=param), schema)


def _extras(fields: Fields) -> list[Format]:
    """vLLM's words, of today (`structured_outputs`) and of before."""
    inner = fields.object("structured_outputs")
    for name in NOT_HERE:
        if inner.get(name) not in (None, False):
            raise UnsupportedParameterError(
                f"'{inner.param(name)}' is not supported here.", param=inner.param(name)
            )
    found = [_extra(word, inner.get(word), inner.param(word)) for word in WORDS]
    for word, name in OLD_WORDS.items():
        found.append(_extra(word, fields.get(name), fields.param(name)))
    return [one for one in found if one is not None]


def _extra(word: str, value: Any, param: str) -> Format | None:
    if value is None or (word == "json_object" and value is False):
        return None
    if word == "json_object":
        return _json({"type": "object"}, param)
    if word == "json":
        if isinstance(value, str):
            try:
                value = json.loads(as_text(value, param))
            except (ValueError, RecursionError):
                raise RequestError(f"'{param}' is not valid JSON.", param=param) from None
        return _json(as_object(value, param), param)
    if word == "choice":
        texts = [as_text(one, param) for one in as_list(value, param)]
        if not texts or not all(texts):
            raise RequestError(f"'{param}' needs texts to choose from.", param=param)
        return Format(constraint=Constraint(word, json.dumps(texts), param=param))
    if not isinstance(value, str):
        raise wrong_type(value, "a string", param)
    return Format(constraint=Constraint(word, as_text(value, param), param=param))


def constrain(format: Format, calling: Calling) -> Constraint | None:
    """What binds an answer that may, or must, call tools or else have a format."""
    if not calling.callable:
        return format.constraint
    content = None
    if format.constraint is not None and not calling.required:
        if format.schema is None:
            raise UnsupportedParameterError(
                f"'{format.constraint.param}' cannot be combined with tools; a JSON format can.",
                param=format.constraint.param,
            )
        content = json_rule(format.schema, lenient=format.constraint.lenient)
    assert calling.format is not None
    grammar = calling.format.grammar(
        calling.callable, required=calling.required, parallel=calling.parallel, content=content
    )
    return Constraint("grammar", grammar, param="tools")

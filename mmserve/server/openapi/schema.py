"""JSON Schema in few words.

Owns two habits of this API: what is asked may say null for an absent field and more than is known,
what is answered says all of what is described and nothing else. Knows no surface.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Schema = dict[str, Any]

ANYTHING: Schema = {}
STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
TIME: Schema = {"type": "integer", "description": "Unix seconds."}
OBJECT: Schema = {"type": "object"}
DIGEST: Schema = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
NULL: Schema = {"type": "null"}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def words(*allowed: str | None) -> Schema:
    return {"enum": list(allowed)}


def array(of: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": of, **more}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def nullable(schema: Schema) -> Schema:
    if schema.get("type") == "null":
        return schema
    if isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"]}
    if "enum" in schema:
        values = schema["enum"]
        return schema if None in values else {**schema, "enum": [*values, None]}
    if set(schema) == {"anyOf"}:
        return either(*schema["anyOf"], NULL)
    return either(schema, NULL)


def between(low: float, high: float, *, whole: bool = False) -> Schema:
    kind = "integer" if whole else "number"
    return {"type": kind, "minimum": low, "maximum": high}


def asked(fields: Mapping[str, Schema], required: Iterable[str] = (), **more: Any) -> Schema:
    """An object of a request."""
    needed = list(required)
    properties = {
        name: schema if name in needed or not schema else nullable(schema)
        for name, schema in fields.items()
    }
    return {
        "type": "object",
        "properties": properties,
        **({"required": needed} if needed else {}),
        **more,
    }


def said(fields: Mapping[str, Schema], maybe: Mapping[str, Schema] | None = None) -> Schema:
    """An object of an answer; those of `maybe` may be missing."""
    return {
        "type": "object",
        "properties": {**fields, **(maybe or {})},
        "required": list(fields),
        "additionalProperties": False,
    }


def listed(of: Schema, more: Mapping[str, Schema] | None = None) -> Schema:
    """A page of OpenAI's."""
    return said({"object": {"const": "list"}, "data": array(of), **(more or {})})


PAGED = {"first_id": nullable(STRING), "last_id": nullable(STRING), "has_more": BOOLEAN}

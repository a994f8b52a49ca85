"""Reading fields of a JSON body, a form or a query, with the path of the field in every refusal.

Owns type checks (a bool is no int, a null is an absent field). Knows nothing of what fields mean.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

from starlette.datastructures import ImmutableMultiDict

from mmserve.errors import RequestError
from mmserve.server.errors import InvalidJSONError, MissingParameterError
from mmserve.server.wire import loads

T = TypeVar("T")


def parse_body(data: bytes | str) -> dict[str, Any]:
    """A JSON object, or `InvalidJSONError`."""
    try:
        body = loads(data)
    except ValueError:
        raise InvalidJSONError("The body is not valid JSON.") from None
    if not isinstance(body, dict):
        raise InvalidJSONError("The body must be a JSON object.")
    return body


def kind_of(value: Any) -> str:
    """The JSON name of a value's type."""
    if value is None:
        return "null"
    for type_, name in ((bool, "a boolean"), (str, "a string"), (dict, "an object")):
        if isinstance(value, type_):
            return name
    return "an array" if isinstance(value, list) else "a number"


def wrong_type(value: Any, expected: str, param: str) -> RequestError:
    return RequestError(f"'{param}' must be {expected}, not {kind_of(value)}.", param=param)


def as_text(value: Any, param: str) -> str:
    """A string that has a UTF-8 form."""
    if not isinstance(value, str):
        raise wrong_type(value, "a string", param)
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise RequestError(f"'{param}' holds half a surrogate pair.", param=param) from None
    return value


def as_object(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(value, "an object", param)
    return value


def as_list(value: Any, param: str) -> list[Any]:
    if not isinstance(value, list):
        raise wrong_type(value, "an array", param)
    return value


def once(values: ImmutableMultiDict[str, T], name: str) -> T | None:
    """A field of a form or a query, which may say each twice. Raises `RequestError` then: nobody
    knows which is meant."""
    found = values.getlist(name)
    if len(found) > 1:
        raise RequestError(f"'{name}' is given {len(found)} times.", param=name)
    return found[0] if found else None


def whole_text(values: ImmutableMultiDict[str, Any], name: str, low: int, high: int) -> int | None:
    """An integer of a form or a query."""
    text = once(values, name)
    if text is None:
        return None
    digits = text.removeprefix("-") if isinstance(text, str) else ""
    if digits.isascii() and digits.isdigit() and len(digits) < 10 and low <= int(text) <= high:
        return int(text)
    raise RequestError(f"'{name}' must be an integer from {low} to {high}.", param=name)


class Fields:
    """One JSON object at `path`; a null field reads as absent."""

    def __init__(self, values: dict[str, Any], path: str = "") -> None:
        self.values = values
        self.path = path

    def param(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def required(self, name: str) -> Any:
        value = self.values.get(name)
        if value is None:
            param = self.param(name)
            raise MissingParameterError(f"'{param}' is required.", param=param)
        return value

    def text(self, name: str) -> str | None:
        value = self.get(name)
        return None if value is None else as_text(value, self.param(name))

    def choice(self, name: str, allowed: tuple[str, ...], default: str) -> str:
        value = self.get(name)
        if value is None:
            return default
        if value not in allowed:
            names = ", ".join(allowed)
            param = self.param(name)
            raise RequestError(f"'{param}' must be one of: {names}.", param=param)
        return str(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong_type(value, "a boolean", self.param(name))
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        param = self.param(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # a JSON writer may put 16 as 16.0
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(value, "an integer", param)
        if not low <= value <= high:
            raise RequestError(f"'{param}' must be from {low} to {high}.", param=param)
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.get(name)
        if value is None:
            return None
        param = self.param(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise wrong_type(value, "a number", param)
        try:
            number = float(value)
        except OverflowError:  # an integer of more than 308 digits
            number = math.inf
        if not math.isfinite(number) or not low <= number <= high:
            raise RequestError(f"'{param}' must be from {low:g} to {high:g}.", param=param)
        return number

    def object(self, name: str) -> Fields:
        """The object under `name`; empty where absent."""
        value = self.get(name)
        param = self.param(name)
        return Fields({} if value is None else as_object(value, param), param)

    def list(self, name: str) -> list[Any]:
        """The array under `name`; empty where absent."""
        value = self.get(name)
        return [] if value is None else as_list(value, self.param(name))

    def metadata(self) -> dict[str, str]:
        """OpenAI's `metadata`: at most 16 strings of 512 characters under keys of 64."""
        value = self.get("metadata")
        param = self.param("metadata")
        if value is None:
            return {}
        pairs = as_object(value, param)
        if len(pairs) > 16:
            raise RequestError(f"'{param}' may hold 16 pairs.", param=param)
        for key, text in pairs.items():
            if len(as_text(key, param)) > 64 or len(as_text(text, f"{param}.{key[:64]}")) > 512:
                raise RequestError(
                    f"'{param}' takes keys of 64 and values of 512 characters.", param=param
                )
        return pairs

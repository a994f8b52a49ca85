"""Reading a request's body as what it says it is.

Owns the content types that are taken: one a route, and of JSON whatever has JSON's syntax. A
request that names none is believed to have sent the right one. Knows nothing of what bodies mean.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from mmserve.server.errors import UnsupportedMediaTypeError
from mmserve.server.fields import parse_body

JSON, FORM, BYTES = "application/json", "multipart/form-data", "application/octet-stream"


def check_type(request: Request, wanted: str) -> None:
    """Raises `UnsupportedMediaTypeError`."""
    said = request.headers.get("content-type", wanted).partition(";")[0].strip().lower()
    if said == wanted or (wanted == JSON and said.endswith("+json")):
        return
    raise UnsupportedMediaTypeError(f"The body must be {wanted}, not '{said[:100]}'.")


async def read_json(request: Request) -> dict[str, Any]:
    """Raises `UnsupportedMediaTypeError` and `InvalidJSONError`."""
    check_type(request, JSON)
    return parse_body(await request.body())


async def read_json_if_any(request: Request) -> dict[str, Any]:
    """Nothing at all reads as an empty object."""
    return await read_json(request) if await request.body() else {}

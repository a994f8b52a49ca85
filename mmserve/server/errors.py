"""Refusals that only the border knows, and the one shape every refusal leaves in.

Owns the error envelope, retry headers and the mapping of the framework's own errors. Knows nothing
of requests' contents.
"""

from __future__ import annotations

import math
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from mmserve.errors import InternalError, RequestError
from mmserve.server.wire import JSONBody

RETRY_AFTER_S = {429: 1, 503: 5}
NEVER_AGAIN = (500, 504)  # the same request would end in the same way
# HTTP status by what ended a generation that was no fault of its own.
ENDINGS = {
    "engine_restarted": 503,
    "engine_unavailable": 503,
    "out_of_memory": 503,
    "deadline_exceeded": 504,
    "reader_too_slow": 408,
}


class InvalidJSONError(RequestError):
    code = "invalid_json"


class MissingParameterError(RequestError):
    code = "missing_required_parameter"


class UnsupportedParameterError(RequestError):
    code = "unsupported_parameter"


class ImageURLNotAllowedError(RequestError):
    code = "image_url_not_allowed"


class InvalidImageURLError(RequestError):
    """It may be fetched, but no image comes of it."""

    code = "invalid_image_url"


class PreviousResponseNotFoundError(RequestError):
    code = "previous_response_not_found"


class ResponseNotActiveError(RequestError):
    code = "response_not_active"


class InvalidAPIKeyError(RequestError):
    status = 401
    code = "invalid_api_key"


class OriginNotAllowedError(RequestError):
    status = 403
    code = "origin_not_allowed"


class AdminOnlyError(RequestError):
    """For the holder of an admin key, and this server knows none."""

    status = 403
    code = "admin_key_required"


class NotFoundError(RequestError):
    """`code` is model_not_found, response_not_found, file_not_found or not_found."""

    status = 404
    code = "not_found"


class MethodNotAllowedError(RequestError):
    status = 405
    code = "method_not_allowed"


class RequestTooLargeError(RequestError):
    status = 413
    code = "request_too_large"


class UnsupportedMediaTypeError(RequestError):
    status = 415
    code = "unsupported_media_type"


class RateLimitError(RequestError):
    status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class GenerationFailedError(RequestError):
    """What ended a running generation, by the code of its last event."""

    kind = "server_error"

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message, code=code)
        self.status = ENDINGS.get(code, 500)


class HostMemoryLowError(RequestError):
    """New work might end what runs."""

    status = 503
    kind = "server_error"
    code = "host_memory_low"


class StorageUnavailableError(RequestError):
    """The disk or the database refused a write; what needs no storage goes on."""

    status = 503
    kind = "server_error"
    code = "storage_unavailable"


def error_object(error: RequestError) -> dict[str, Any]:
    """The inner object of the envelope."""
    return {
        "message": error.message,
        "type": error.kind,
        "param": error.param,
        "code": error.code,
    }


def error_headers(error: RequestError) -> dict[str, str]:
    """Retry advice in the words the SDKs read."""
    headers = {}
    if error.status in RETRY_AFTER_S:
        seconds = error.retry_after_s or RETRY_AFTER_S[error.status]
        headers["retry-after"] = str(math.ceil(seconds))
    if error.status in NEVER_AGAIN:
        headers["x-should-retry"] = "false"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def error_response(error: RequestError, headers: dict[str, str] | None = None) -> Response:
    """The HTTP answer of a refusal."""
    return JSONBody(
        {"error": error_object(error)},
        status_code=error.status,
        headers={**error_headers(error), **(headers or {})},
    )


def from_http_exception(error: HTTPException) -> RequestError:
    """What the framework refused, as one of ours."""
    if error.status_code == 404:
        return NotFoundError("There is nothing at this path.")
    if error.status_code == 405:
        return MethodNotAllowedError("This path does not answer this method.")
    if error.status_code == 413:
        return RequestTooLargeError(str(error.detail))
    refused = RequestError(str(error.detail))
    refused.status = error.status_code
    return refused


async def on_request_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for `RequestError`."""
    assert isinstance(error, RequestError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's handler for its own refusals (404, 405, bad multipart)."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["allow"] = ", ".join(sorted(_methods(request)))
    return error_response(from_http_exception(error), headers)


def _methods(request: Request) -> set[str]:
    """Those of the path, which may be several routes: the framework says that of the first only."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    path = next((r.path for r in routes if r.matches(request.scope)[0] is not Match.NONE), None)
    return {method for r in routes if r.path == path for method in r.methods or ()}


def internal_error() -> InternalError:
    """What the outside learns of our own fault."""
    return InternalError("The server had an internal error.")

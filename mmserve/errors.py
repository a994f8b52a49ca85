"""The named errors a user can cause, each with OpenAI's error fields.

Owns the mapping from a fault to (HTTP status, type, code). Knows nothing of HTTP frameworks: the
server turns these into bodies and events. Our own broken invariants are `assert`s, not these.
"""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its class where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class RequestError(Exception):
    """A request that is refused. `message` names the thing and the limit; `param` the field."""

    status = 400
    kind = "invalid_request_error"
    code = "invalid_value"
    retry_after_s: float | None = None  # where more is known than the status says

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidImageError(RequestError):
    """The bytes are not a whole, decodable image."""

    code = "invalid_image"


class UnsupportedImageTypeError(RequestError):
    """The bytes are an image, or a file, of a format that is not accepted."""

    code = "unsupported_image_type"


class ImageTooLargeError(RequestError):
    """More bytes, pixels or a longer side than the limit, known before decoding."""

    code = "image_too_large"


class TooManyImagesError(RequestError):
    code = "too_many_images"


class ContextLengthExceededError(RequestError):
    """The prompt (or prompt + max_tokens) can never fit the context or the KV pools."""

    code = "context_length_exceeded"


class PinBudgetExceededError(RequestError):
    """Pinned images would take more than their share of the vision KV pool."""

    code = "pin_budget_exceeded"


class KVRefusedError(RequestError):
    """A KV file that cannot be used, or none that could be written: why."""

    code = "kv_file_refused"


class QueueFullError(RequestError):
    status = 429
    kind = "rate_limit_error"
    code = "queue_full"


class OverloadedError(RequestError):
    """What was promised to those that are there would not be kept."""

    status = 429
    kind = "rate_limit_error"
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineUnavailableError(RequestError):
    """The engine is loading, draining or has stopped."""

    status = 503
    kind = "server_error"
    code = "engine_unavailable"


class ModelLoadingError(EngineUnavailableError):
    code = "model_loading"


class ShuttingDownError(EngineUnavailableError):
    code = "shutting_down"


class InternalError(RequestError):
    status = 500
    kind = "server_error"
    code = "internal_error"

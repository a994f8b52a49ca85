"""What the server's log looks like, and what never stands in it.

Owns the two forms, a line of text or of JSON. A fault is told by its kind and its place, without
its message, which may quote what was asked; but the engine's, which knows tokens and tensors only.
Knows nothing of requests.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

WITH_MESSAGES = "mmserve.engine"
TEXT = "%(levelname)s %(name)s: %(message)s"


def told(error: BaseException) -> str:
    """Kinds and places of a fault and of what led to it, the first cause first."""
    return "\n".join(line for each in reversed(list(_chain(error))) for line in _lines(each))


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _lines(error: BaseException) -> Iterator[str]:
    for frame in traceback.extract_tb(error.__traceback__):
        yield f"  {frame.filename}:{frame.lineno} in {frame.name}"
    yield f"{type(error).__module__}.{type(error).__qualname__}"


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return super().format(_discreet(record))


class JSONFormatter(logging.Formatter):
    """One object a line: `time`, `level`, `logger`, `message`, the record's `fields`, `fault`."""

    def format(self, record: logging.LogRecord) -> str:
        record = _discreet(record)
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        body: dict[str, Any] = {
            "time": f"{at}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            body["fault"] = record.exc_text
        return json.dumps(body, ensure_ascii=False, default=str)


def _discreet(record: logging.LogRecord) -> logging.LogRecord:
    error = record.exc_info[1] if record.exc_info else None
    if error is None or record.name.startswith(WITH_MESSAGES):
        return record
    record = copy.copy(record)
    record.exc_text = told(error)
    return record


def install(form: str) -> None:
    """All of the process's log goes to standard error in this form, text or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter() if form == "json" else TextFormatter(TEXT))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in ("mmserve.access", "mmserve.server"):
        logging.getLogger(name).setLevel(logging.INFO)

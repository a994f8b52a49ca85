"""Requests that are refused, counted by the reason that their users are told.

Owns the counting. Knows nothing of why anything is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from mmserve.errors import RequestError
from mmserve.metrics import Metrics

P = ParamSpec("P")
R = TypeVar("R")


class Counts(Protocol):
    @property
    def status(self) -> str: ...

    @property
    def metrics(self) -> Metrics: ...


S = TypeVar("S", bound=Counts)


def counted(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except RequestError as error:
            _count(self, error)
            raise

    return call


def counted_later(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    @functools.wraps(method)
    async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await method(self, *args, **kwargs)
        except RequestError as error:
            _count(self, error)
            raise

    return call


def _count(self: Counts, error: RequestError) -> None:
    if self.status != "loading":  # there are no metrics before
        self.metrics.request_refused(error.code)

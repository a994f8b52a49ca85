"""Responses over HTTP (surface B): create, retrieve, resume, cancel, delete, items, counting.

Owns the routes. Generations are jobs; a stream only tails a job's log.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mmserve.errors import RequestError
from mmserve.server.bodies import read_json
from mmserve.server.deadline import Deadline
from mmserve.server.errors import ResponseNotActiveError
from mmserve.server.event_log import LogEvictedError
from mmserve.server.fields import once, whole_text
from mmserve.server.job import Tail
from mmserve.server.responder import Responder
from mmserve.server.responses_request import ResponseRequest, parse_response_request
from mmserve.server.services import Services, owner_of, services_of, turn_of
from mmserve.server.turn import Turn
from mmserve.server.wire import EventStream, JSONBody, dumps, sse, while_connected

IMAGE_URLS = "message.input_image.image_url"
MAX_PAGE = 100
MAX_AFTER = 10**9 - 1
FLAGS = {"true": True, "1": True, "false": False, "0": False}


async def _frames(tail: Tail, on_slow: Callable[[], None]) -> AsyncGenerator[bytes, None]:
    last = -1
    try:
        async for event in tail.events():
            last = event.sequence_number
            yield sse(event.data, event.type)
    except LogEvictedError as error:
        on_slow()
        flat = {"code": "reader_too_slow", "message": error.message, "param": None}
        yield sse(dumps({"type": "error", "sequence_number": last + 1, **flat}), "error")
    except RequestError as error:
        flat = {"code": error.code, "message": error.message, "param": error.param}
        event_json = {"type": "error", "sequence_number": last + 1, **flat}
        yield sse(dumps(event_json), "error")


def _stream(tail: Tail, services: Services) -> Response:
    limits = services.stream_limits
    return EventStream(_frames(tail, limits.on_slow), limits, tail.close)


async def _wait(turn: Turn, tail: Tail) -> Response:
    assert turn.job is not None
    try:
        await turn.job.wait()
    finally:
        tail.close()
    return JSONBody(turn.current())


async def create_response(request: Request) -> Response:
    """POST /v1/responses."""
    services = services_of(request)
    services.check_ready()
    body = await read_json(request)
    parsed = parse_response_request(body, services.info)
    deadline = Deadline.of(body, services.config.max_request_s, request.headers)
    responder = Responder(services, owner_of(request))
    return await while_connected(request, _create(responder, parsed, services, deadline))


async def _create(
    responder: Responder, parsed: ResponseRequest, services: Services, deadline: Deadline
) -> Response:
    if parsed.background and not parsed.store:
        raise RequestError("'background' needs 'store'.", param="background")
    grace_s = None if parsed.background else 0.0
    turn = await responder.start(parsed, deadline, grace_s=grace_s)
    assert turn.job is not None
    if parsed.stream:
        return _stream(turn.job.attach(), services)
    if parsed.background:
        return JSONBody(turn.current())
    return await _wait(turn, turn.job.attach())


def _flag(request: Request, name: str) -> bool:
    text = once(request.query_params, name)
    wanted = False if text is None else FLAGS.get(text.lower())
    if wanted is None:
        raise RequestError(f"'{name}' must be one of: {', '.join(FLAGS)}.", param=name)
    return wanted


async def retrieve_response(request: Request) -> Response:
    """GET /v1/responses/{id}; with `stream=true` a replay from the log that goes on live."""
    services, turn = services_of(request), await turn_of(request)
    last = whole_text(request.query_params, "starting_after", -1, MAX_AFTER)
    after = -1 if last is None else last
    if not _flag(request, "stream"):
        return JSONBody(turn.current())
    if turn.job is None:
        raise LogEvictedError(
            "The events of this response are no longer held.", param="starting_after"
        )
    turn.job.log.check_held(after)
    services.metrics.resumes.inc()
    return _stream(turn.job.attach(after), services)


async def cancel_response(request: Request) -> Response:
    """POST /v1/responses/{id}/cancel."""
    turn = await turn_of(request)
    if not turn.active:
        raise ResponseNotActiveError("The response has ended already.", param="response_id")
    assert turn.job is not None
    turn.job.cancel()
    await turn.job.wait()
    return JSONBody(turn.current())


async def delete_response(request: Request) -> Response:
    """DELETE /v1/responses/{id}; stops it first where it runs."""
    turn = await turn_of(request)
    if turn.active:
        assert turn.job is not None
        turn.job.cancel()
    await services_of(request).responses.delete(turn)
    return JSONBody({"id": turn.id, "object": "response.deleted", "deleted": True})


def _page(request: Request, ids: list[str]) -> tuple[list[str], bool]:
    query = request.query_params
    limit = whole_text(query, "limit", 1, MAX_PAGE) or 20
    order = once(query, "order")
    if order not in (None, "asc", "desc"):
        raise RequestError("'order' must be one of: asc, desc.", param="order")
    if order != "asc":
        ids = ids[::-1]
    after = once(query, "after")
    if after is not None:
        if after not in ids:
            raise RequestError("'after' names no item of this response.", param="after")
        ids = ids[ids.index(after) + 1 :]
    return ids[:limit], len(ids) > limit


async def list_input_items(request: Request) -> Response:
    """GET /v1/responses/{id}/input_items: what the request added, newest first by default."""
    items = {item.id: item for item in (await turn_of(request)).items}
    ids, has_more = _page(request, list(items))
    query = request.query_params
    with_urls = IMAGE_URLS in (query.getlist("include") + query.getlist("include[]"))
    return JSONBody(
        {
            "object": "list",
            "data": [await items[id].to_json(with_urls) for id in ids],
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
            "has_more": has_more,
        }
    )


async def count_input_tokens(request: Request) -> Response:
    """POST /v1/responses/input_tokens."""
    services = services_of(request)
    services.check_ready()
    parsed = parse_response_request(await read_json(request), services.info)
    responder = Responder(services, owner_of(request))
    prompt = await while_connected(request, responder.count(parsed))
    return JSONBody(
        {
            "object": "response.input_tokens",
            "input_tokens": prompt.num_tokens,
            "input_tokens_details": {
                "image_tokens": prompt.num_image_tokens,
                "text_tokens": prompt.num_text_tokens,
            },
        }
    )


ROUTES = [
    Route("/v1/responses", create_response, methods=["POST"]),
    Route("/v1/responses/input_tokens", count_input_tokens, methods=["POST"]),
    Route("/v1/responses/{id}", retrieve_response, methods=["GET"]),
    Route("/v1/responses/{id}", delete_response, methods=["DELETE"]),
    Route("/v1/responses/{id}/cancel", cancel_response, methods=["POST"]),
    Route("/v1/responses/{id}/input_items", list_input_items, methods=["GET"]),
]

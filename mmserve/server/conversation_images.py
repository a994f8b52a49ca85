"""The images of a stored conversation: which it holds, and what becomes of each.

Owns the routes under `/v1/responses/{id}/images`. A change is of what turns go by that continue the
response from then on. Knows nothing of how KV is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mmserve.errors import RequestError
from mmserve.held_image import ACTIVE
from mmserve.server.bodies import read_json_if_any
from mmserve.server.calling import parse_calling
from mmserve.server.errors import NotFoundError, UnsupportedParameterError
from mmserve.server.fields import Fields
from mmserve.server.history import StoredImage
from mmserve.server.services import Services, services_of, turn_of
from mmserve.server.turn import Turn
from mmserve.server.upkeep import Upkeep
from mmserve.server.wire import JSONBody
from mmserve.session import FORGETTING, Forgetting, SessionState

Change = Callable[[SessionState, str], SessionState]


def _first_turns(turn: Turn) -> dict[str, str]:
    """By item: the response that it came with, as far back as the conversation was not cut."""
    found: dict[str, str] = {}
    each: Turn | None = turn
    while each is not None:
        found.update((item.id, each.id) for item in each.items)
        each = each.parent
    return found


def _held(turn: Turn) -> list[StoredImage]:
    """Every image that a next turn is laid out with, forgotten ones too."""
    history = turn.history()
    return [*history.images, *(i for entry in history.entries for i in entry.item.images)]


async def _json(services: Services, turn: Turn, images: list[StoredImage]) -> dict[str, Any]:
    state, first = turn.history().state, _first_turns(turn)
    held = await services.images.held(turn.owner, images)
    data = [
        {
            "object": "response.image",
            "number": image.number,
            "item_id": image.item_id,
            "file_id": image.file_id,
            "sha256": image.digest,
            "first_response_id": first.get(image.item_id or ""),
            "tokens": kv.num_tokens,
            "state": kv.state,
            "bytes": kv.num_bytes,
            "hits": kv.hits,
            "pinned": image.digest in state.pinned,
            "forgotten": state.forgotten.get(image.digest),
            **({"kv_dtype": kv.kv_format} if kv.kv_format else {}),
        }
        for image, kv in zip(images, held, strict=True)
    ]
    return {"object": "list", "data": data, "has_more": False}


async def list_images(request: Request) -> Response:
    """GET /v1/responses/{id}/images: what the conversation that ends there holds, oldest first."""
    services, turn = services_of(request), await turn_of(request)
    services.check_ready()
    return JSONBody(await _json(services, turn, _held(turn)))


def _named(turn: Turn, name: str) -> list[StoredImage]:
    """All of a conversation's images with this SHA-256, or of this file or item."""
    named = [i for i in _held(turn) if name in (i.digest, i.file_id, i.item_id)]
    if not named:
        raise NotFoundError(
            f"The conversation holds no image '{name[:100]}'.",
            param="image",
            code="image_not_found",
        )
    return named


def _upkeep(services: Services, turn: Turn) -> Upkeep:
    """For a next turn that is asked as the last was."""
    response = turn.current()
    asked = Fields({name: response.get(name) for name in ("tools", "tool_choice")})
    calling = parse_calling(asked, services.info, formatted=False)
    return Upkeep(services, response.get("instructions"), calling.described)


async def _change(request: Request, how: Change, *, fetch: bool = False) -> Response:
    """Change what is done with an image. Where that changes the prompt, the new layout is computed
    at once, behind all that is asked for; with `fetch` also where KV is not in the pool."""
    services, turn = services_of(request), await turn_of(request)
    if turn.active:
        raise RequestError("The response has not ended yet.", param="response_id")
    images = _named(turn, request.path_params["image"])

    def every(state: SessionState) -> SessionState:
        for image in images:
            state = how(state, image.digest)
        return state

    before, pinned = turn.history().state.forgotten, every(turn.session).pinned
    try:
        for image in images:
            if image.digest in pinned:
                await services.images.pin(turn.owner, image)
        await services.responses.change_session(turn, every)
    finally:
        services.images.release(turn.owner, images)
    body = await _json(services, turn, images)
    elsewhere = any(image["state"] != ACTIVE for image in body["data"])
    if turn.history().state.forgotten != before or (fetch and elsewhere):
        work = _upkeep(services, turn).prefill(turn, turn.history())
        services.spawn(work, instead_of=f"layout of {turn.id}")
    return JSONBody(body)


async def pin_image(request: Request) -> Response:
    """POST …/images/{image}/pin: cuts leave it in, and its KV goes last; shown if forgotten."""
    services_of(request).check_ready()
    return await _change(request, SessionState.pin, fetch=True)


async def unpin_image(request: Request) -> Response:
    """POST …/images/{image}/unpin."""
    services_of(request).check_ready()
    return await _change(request, SessionState.unpin)


async def forget_image(request: Request) -> Response:
    """POST …/images/{image}/forget, with `mode`: recompute, as if it had never been seen, or
    mark, so that text which saw it stays as it is."""
    services = services_of(request)
    services.check_ready()
    body = await read_json_if_any(request)
    mode = Fields(body).choice("mode", FORGETTING, FORGETTING[0])
    if mode == "mark" and services.info.vision_mode != "isolated":
        raise UnsupportedParameterError(
            "Later images have seen this one in a model of this vision mode, so that it cannot be "
            "marked; with 'recompute' it can be forgotten.",
            param="mode",
        )
    how: Forgetting = "mark" if mode == "mark" else "recompute"
    return await _change(request, lambda state, digest: state.forget(digest, how))


async def restore_image(request: Request) -> Response:
    """POST …/images/{image}/restore: no longer forgotten."""
    services_of(request).check_ready()
    return await _change(request, SessionState.restore)


PATH = "/v1/responses/{id}/images"
ROUTES = [
    Route(PATH, list_images, methods=["GET"]),
    Route(PATH + "/{image}/pin", pin_image, methods=["POST"]),
    Route(PATH + "/{image}/unpin", unpin_image, methods=["POST"]),
    Route(PATH + "/{image}/forget", forget_image, methods=["POST"]),
    Route(PATH + "/{image}/restore", restore_image, methods=["POST"]),
]

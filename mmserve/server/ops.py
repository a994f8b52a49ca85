"""Models, health, metrics and version (surface E).

Reads state; changes none.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mmserve import __version__
from mmserve.server.errors import RETRY_AFTER_S, NotFoundError
from mmserve.server.services import Services, services_of
from mmserve.server.wire import JSONBody

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def limits_json(services: Services) -> dict[str, Any]:
    """What a client may send; bytes, pixels and counts."""
    images, config = services.info.image_limits, services.config
    return {
        "max_body_bytes": config.max_body_bytes,
        "max_frame_bytes": config.max_frame_bytes,
        "max_file_bytes": config.max_file_bytes,
        "max_images": images.max_images,
        "max_image_bytes": images.max_bytes,
        "max_image_pixels": images.max_pixels,
        "max_image_side": images.max_side,
        "image_formats": list(images.formats),
        "lanes_per_socket": config.lanes_per_socket,
        "queue_per_lane": config.queue_per_lane,
    }


def model_json(services: Services) -> dict[str, Any]:
    info = services.info
    vision: dict[str, Any] = {"vision_mode": info.vision_mode} if info.image_tokens else {}
    if vision and info.blend_tokens is not None:
        vision["blend_tokens"] = info.blend_tokens
    if info.image_details:
        vision["image_details"] = dict(info.image_details)
    if info.image_crops is not None:
        vision["image_crops"] = dict(info.image_crops)
    return {
        "id": info.name,
        "object": "model",
        "created": info.created,
        "owned_by": "mmserve",
        "max_model_len": info.max_model_len,
        "image_tokens": info.image_tokens,
        "modalities": {
            "input": ["text", *(["image"] if info.image_tokens else [])],
            "output": ["text"],
        },
        **vision,
        "limits": limits_json(services),
    }


async def list_models(request: Request) -> Response:
    """GET /v1/models."""
    return JSONBody({"object": "list", "data": [model_json(services_of(request))]})


async def retrieve_model(request: Request) -> Response:
    """GET /v1/models/{id}."""
    services = services_of(request)
    if request.path_params["id"] != services.info.name:
        raise NotFoundError("No such model.", param="model", code="model_not_found")
    return JSONBody(model_json(services))


async def health(request: Request) -> Response:
    """GET /health: 200 only while generations can start."""
    services = services_of(request)
    status, stages = services.status(), services.engine.stages
    if status == "ok":
        return JSONBody({"status": status, **({"stages": stages} if stages else {})})
    headers = {"retry-after": str(RETRY_AFTER_S[503])}
    return JSONBody({"status": status}, status_code=503, headers=headers)


async def live(request: Request) -> Response:
    """GET /health/live: 200 while the process answers."""
    return JSONBody({"status": "alive"})


async def metrics(request: Request) -> Response:
    """GET /metrics."""
    services = services_of(request)
    services.metrics.stored_responses.set(len(services.responses))
    services.metrics.blob_bytes.set(services.blobs.used_bytes)
    body = services.metrics.render()
    if services.engine.status != "loading":
        body = services.engine.metrics.render() + body
    return Response(body, media_type=METRICS_TYPE)


async def version(request: Request) -> Response:
    """GET /version."""
    services = services_of(request)
    body: dict[str, Any] = {"version": __version__}
    if services.engine.status != "loading":
        body |= {"model": services.info.name, "limits": limits_json(services)}
    return JSONBody(body)


ROUTES = [
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{id:path}", retrieve_model, methods=["GET"]),
    Route("/health", health, methods=["GET"]),
    Route("/health/live", live, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
    Route("/version", version, methods=["GET"]),
]

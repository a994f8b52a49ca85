"""The application: every surface's routes, the layers around them, start and stop.

Owns assembly only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

import mmserve
from mmserve.config import ServerConfig
from mmserve.errors import RequestError
from mmserve.server import (
    chat,
    conversation_images,
    files,
    kv_files,
    kv_view,
    ops,
    realtime,
    responses,
    responses_ws,
)
from mmserve.server.auth import Guard
from mmserve.server.blobs import BlobStore
from mmserve.server.engine_face import EngineFace
from mmserve.server.envelope import Envelope
from mmserve.server.errors import on_http_exception, on_request_error
from mmserve.server.files import FileStore
from mmserve.server.image_fetch import ImageFetcher
from mmserve.server.image_keeper import ImageKeeper
from mmserve.server.journal import Database, Journal, NoJournal
from mmserve.server.kv_feed import KVFeed
from mmserve.server.limits import RATE_HEADERS
from mmserve.server.memory_guard import MemoryGuard
from mmserve.server.openapi import document
from mmserve.server.page import Page
from mmserve.server.server_metrics import ServerMetrics
from mmserve.server.services import Services
from mmserve.server.shared import NoSiblings, SharedStore, Siblings
from mmserve.server.store import ResponseStore
from mmserve.server.tenants import Tenants
from mmserve.server.tracing import TraceContext, tracing_to

SWEEP_S = 60.0  # between two looks for expired files and responses
MEMORY_S = 1.0  # between two looks at the host's memory


def _services(engine: EngineFace, config: ServerConfig) -> Services:
    folder = config.data_dir
    url, faults, shared = config.database_url, config.faults, config.replica is not None
    database = None if folder is None else Database(folder, url, faults, shared=shared)
    journal: Journal = database or NoJournal()
    blobs = BlobStore(folder and folder / "blobs", journal, faults, shared=shared)
    files = FileStore(blobs, config, journal)
    tenants = Tenants(config)
    images = ImageKeeper(engine, lambda owner: tenants.account(owner).tenant)
    responses = ResponseStore(config, blobs, journal, on_pins=images.moved)
    siblings: Siblings = NoSiblings()
    if database is not None and shared:
        siblings = SharedStore(database, blobs, responses, files, images)
    elif database is not None:
        files.restore(database)
        responses.restore(database)
    return Services(
        engine=engine,
        config=config,
        tenants=tenants,
        tracing=tracing_to(config.otlp_traces_endpoint),
        journal=journal,
        blobs=blobs,
        files=files,
        responses=responses,
        siblings=siblings,
        metrics=ServerMetrics(),
        images=images,
        kv_feed=KVFeed(engine, responses),
        fetcher=ImageFetcher(config.allow_image_hosts),
        memory=MemoryGuard(config.host_memory_limit),
    )


async def _sweep(services: Services) -> None:
    while True:
        services.files.expire()
        services.responses.expire()
        await services.siblings.sweep()
        await asyncio.sleep(SWEEP_S)


async def _guard_memory(services: Services) -> None:
    while True:
        if services.memory.look():
            services.shrink()
        await asyncio.sleep(MEMORY_S)


async def _pin_again(services: Services, starting: asyncio.Future[None]) -> None:
    await asyncio.wait((starting,))
    if not starting.cancelled() and starting.exception() is None:
        await services.images.pin_again(services.responses.pinned())


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    services: Services = app.state.services
    services.blobs.open()
    kv_files.clear(services.config.data_dir)
    # Started beside the server, so that /health can say "loading" meanwhile.
    starting = services.started = asyncio.ensure_future(services.engine.start())
    services.spawn(_pin_again(services, starting))
    sweeping = asyncio.ensure_future(_sweep(services))
    guarding = asyncio.ensure_future(_guard_memory(services))
    try:
        yield
    finally:
        services.draining = True
        await services.stop_jobs()
        others = (starting, sweeping, guarding, *services.background)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await services.engine.stop()
        services.blobs.close()
        services.journal.close()
        await asyncio.to_thread(services.tracing.close)


def _middleware(config: ServerConfig, services: Services) -> list[Middleware]:
    layers = [Middleware(Envelope, config=config, metrics=services.metrics)]
    if config.allow_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.allow_origins,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),
                expose_headers=("x-request-id", "retry-after", *RATE_HEADERS),
            )
        )
    layers.append(Middleware(Guard, config=config, tenants=services.tenants))
    if config.otlp_traces_endpoint is not None:
        layers.append(Middleware(TraceContext, tracing=services.tracing))
    return layers


def create_app(
    engine: EngineFace,
    config: ServerConfig,
    *,
    page_folder: Path | None = None,
) -> Starlette:
    """An ASGI application over one engine, which it starts and stops.

    Raises `CannotStoreError` where the configured data folder or database cannot be used.
    """
    services = _services(engine, config)
    app = Starlette(
        routes=[
            *ops.ROUTES,
            *files.ROUTES,
            *chat.ROUTES,
            *responses.ROUTES,
            *conversation_images.ROUTES,
            *responses_ws.ROUTES,
            *realtime.ROUTES,
            *kv_files.ROUTES,
            *kv_view.ROUTES,
            *document.ROUTES,
        ],
        middleware=_middleware(config, services),
        exception_handlers={
            RequestError: on_request_error,
            HTTPException: on_http_exception,
        },
        lifespan=_lifespan,
    )
    app.state.services = services
    app.router.redirect_slashes = False
    app.router.default = Page(page_folder or Path(mmserve.__file__).parent / "webui")
    return app

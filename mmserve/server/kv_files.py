"""KV files over HTTP, for the holder of an admin key: all that is cached out, a file in.

Owns the routes and the temporary files between socket and engine. Knows nothing of what is in them.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from mmserve.config import GIB
from mmserve.errors import RequestError
from mmserve.server.auth import ADMIN_PATH
from mmserve.server.bodies import BYTES, check_type
from mmserve.server.errors import RequestTooLargeError, StorageUnavailableError
from mmserve.server.services import Services, services_of
from mmserve.server.wire import JSONBody

SPARE = GIB  # bytes of the disk that an import leaves free
PREFIX = ".kv-"  # of folders of temporary files


def clear(data_dir: Path | None) -> None:
    """Files that a process left behind which was killed; no other server uses the folder."""
    for folder in () if data_dir is None else data_dir.glob(f"{PREFIX}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _folder(services: Services) -> Path:
    """A new folder where data are kept, else where the system has temporary files."""
    parent = services.config.data_dir
    try:
        return Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    except OSError as error:
        raise StorageUnavailableError(f"There is no room for a KV file: {error}") from error


async def export_kv(request: Request) -> Response:
    """GET /v1/kv: all that is cached now, as one KV file."""
    services = services_of(request)
    services.check_ready()
    folder = _folder(services)
    remove = BackgroundTask(shutil.rmtree, folder, ignore_errors=True)
    try:
        await services.engine.export_kv(folder / "all.kv")
    except BaseException:
        await remove()
        raise
    return FileResponse(folder / "all.kv", filename="mmserve.kv", background=remove)


async def import_kv(request: Request) -> Response:
    """POST /v1/kv, the body a KV file: what of it came in, text tokens and images."""
    services = services_of(request)
    services.check_ready()
    check_type(request, BYTES)
    folder = _folder(services)
    try:
        await _receive(request, folder / "sent.kv")
        return JSONBody(await services.engine.import_kv(folder / "sent.kv"))
    finally:
        await run_in_threadpool(shutil.rmtree, folder, ignore_errors=True)


async def _receive(request: Request, path: Path) -> None:
    room = shutil.disk_usage(path.parent).free - SPARE
    size = 0
    with path.open("wb") as file:
        async for part in request.stream():
            size += len(part)
            if size > room:
                raise RequestTooLargeError(f"The disk has room for {max(room, 0)} bytes only.")
            try:
                await run_in_threadpool(file.write, part)
            except OSError as error:
                raise StorageUnavailableError(f"The file could not be kept: {error}") from error
    if not size:
        raise RequestError("The body is empty; it is to be a KV file.", param="file")


ROUTES = [
    Route(ADMIN_PATH, export_kv, methods=["GET"]),
    Route(ADMIN_PATH, import_kv, methods=["POST"]),
]

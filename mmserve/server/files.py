"""Uploaded files (surface E): `/v1/files`.

Owns `FileStore` (ids, owners, expiry, budget) and its routes. Bytes lie in the blob store; whether
an image is sound is the engine's judgement.
"""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mmserve.config import ServerConfig
from mmserve.errors import RequestError, UnsupportedImageTypeError
from mmserve.prompt import ImagePart, Message
from mmserve.server import rows
from mmserve.server.access import Access
from mmserve.server.blobs import Blob, BlobStore
from mmserve.server.bodies import FORM, check_type
from mmserve.server.errors import (
    MissingParameterError,
    NotFoundError,
    RequestTooLargeError,
    StorageUnavailableError,
)
from mmserve.server.fields import once, whole_text
from mmserve.server.images import sniff
from mmserve.server.journal import Database, Journal, NoJournal
from mmserve.server.services import Services, access_of, owner_of, services_of
from mmserve.server.wire import JSONBody, new_id

log = logging.getLogger("mmserve.server")

PURPOSES = ("vision", "user_data")
DISK_BLOCK = 4096  # bytes: what even a tiny file costs
ANCHOR = "created_at"  # from when a file's life is counted
MIN_TTL_S, MAX_TTL_S = 3600, 30 * 24 * 3600


@dataclass(frozen=True)
class StoredFile:
    """One upload; `media_type` is None for what is no image."""

    id: str
    owner: str
    blob: Blob
    filename: str
    purpose: str
    media_type: str | None
    created_at: int
    expires_at: int

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.blob.size,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "expires_at": self.expires_at,
        }

    def to_row(self) -> dict[str, Any]:
        body = {
            "sha256": self.blob.digest.hex(),
            "filename": self.filename,
            "purpose": self.purpose,
            "media_type": self.media_type,
            "created_at": self.created_at,
        }
        return {
            "id": self.id,
            "owner": self.owner,
            "expires_at": self.expires_at,
            "body": rows.to_text(body),
        }


def file_of_row(row: sa.Row[Any], find: rows.FindBlob) -> StoredFile:
    """Raises KeyError where its bytes are lost."""
    body = json.loads(row.body)
    blob = find(bytes.fromhex(body.pop("sha256")))
    return StoredFile(row.id, row.owner, blob, expires_at=int(row.expires_at), **body)


class FileStore:
    """Uploads by id, each visible to its owner only, until they expire."""

    def __init__(
        self, blobs: BlobStore, config: ServerConfig, journal: Journal | None = None
    ) -> None:
        self._blobs = blobs
        self._config = config
        self._journal = journal or NoJournal()
        self._files: OrderedDict[str, StoredFile] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        return sum(max(file.blob.size, DISK_BLOCK) for file in self._files.values())

    async def add(
        self,
        data: bytes,
        *,
        owner: str,
        salt: bytes = b"",
        filename: str,
        purpose: str,
        ttl_s: int | None,
    ) -> StoredFile:
        """Keep an upload: it lasts once this returns. `salt`: see `BlobStore.put`.

        Raises `RequestTooLargeError` when the budget is spent, and `StorageUnavailableError`.
        """
        self.expire()
        if self.used_bytes + len(data) > self._config.max_files_bytes:
            limit = self._config.max_files_bytes / 2**20
            raise RequestTooLargeError(f"The uploads would pass {limit:g} MiB; delete some.")
        blob = await self._blobs.put(data, salt)
        now = int(time.time())
        file = StoredFile(
            id=new_id(self._config.prefix("file")),
            owner=owner,
            blob=blob,
            filename=filename,
            purpose=purpose,
            media_type=sniff(data),
            created_at=now,
            expires_at=now + (ttl_s or self._config.file_ttl_s),
        )
        self._files[file.id] = file
        try:
            await self._journal.write(rows.insert(rows.FILES, **file.to_row()))
        except StorageUnavailableError:
            self._files.pop(file.id, None)
            raise
        return file

    def restore(self, database: Database) -> None:
        """Take in what an earlier process kept; what has expired goes with the next `expire`."""
        for row in database.read(sa.select(rows.FILES).order_by(rows.FILES.c.number)):
            try:
                self._files[row.id] = file_of_row(row, self._blobs.find)
            except KeyError:
                log.warning("%s has lost its bytes", row.id)

    def here(self, id: str) -> StoredFile | None:
        """A file in memory, whoever owns it."""
        return self._files.get(id)

    def take(self, file: StoredFile) -> None:
        """Have a file that another server keeps in the same database."""
        self._files[file.id] = file

    def lost(self, id: str) -> None:
        """Another server has removed it."""
        self._files.pop(id, None)

    def get(self, id: str, owner: str, param: str | None = None) -> StoredFile:
        """The file, or `NotFoundError` for anybody else's, expired or unknown id."""
        file = self._files.get(id)
        if file is None or file.owner != owner or file.expires_at <= time.time():
            raise NotFoundError(f"No such file: '{id[:100]}'.", param=param, code="file_not_found")
        return file

    async def remove(self, id: str, owner: str) -> None:
        """Gone for good once this returns. Raises `StorageUnavailableError`."""
        file = self.get(id, owner)
        await self._journal.write(rows.remove_file(file.id))
        self._files.pop(file.id, None)

    def list(self, owner: str) -> list[StoredFile]:
        """Newest first."""
        self.expire()
        return [file for file in reversed(self._files.values()) if file.owner == owner]

    def expire(self) -> None:
        now = time.time()
        for file in [file for file in self._files.values() if file.expires_at <= now]:
            del self._files[file.id]
            self._journal.write(rows.remove_file(file.id))


def _ttl(form: FormData) -> int | None:
    if once(form, "expires_after[anchor]") not in (None, ANCHOR):
        raise RequestError(
            f"'expires_after[anchor]' must be '{ANCHOR}'.", param="expires_after[anchor]"
        )
    return whole_text(form, "expires_after[seconds]", MIN_TTL_S, MAX_TTL_S)


async def _checked(services: Services, access: Access, upload: UploadFile, purpose: str) -> bytes:
    limit = services.config.max_file_bytes
    if upload.size is None or upload.size > limit:
        raise RequestTooLargeError(f"A file may have {limit / 2**20:g} MiB.", param="file")
    data = await upload.read()
    if not data:
        raise RequestError("The file is empty.", param="file")
    if sniff(data) is not None:
        await access.prepare([Message("user", (ImagePart(data, "file"),))])
    elif purpose == "vision":
        raise UnsupportedImageTypeError(
            "The file is not a PNG, JPEG, WebP or GIF image.", param="file"
        )
    return data


async def create_file(request: Request) -> Response:
    """POST /v1/files: multipart `file` and `purpose`."""
    services, access = services_of(request), access_of(request)
    access.request()
    access = access.unasked
    check_type(request, FORM)
    async with request.form(max_files=1, max_fields=16, max_part_size=4096) as form:
        upload, purpose = once(form, "file"), once(form, "purpose")
        if not isinstance(upload, UploadFile):
            raise MissingParameterError("'file' is required.", param="file")
        if purpose not in PURPOSES:
            names = ", ".join(PURPOSES)
            raise RequestError(f"'purpose' must be one of: {names}.", param="purpose")
        ttl_s = _ttl(form)
        assert isinstance(purpose, str)
        data = await _checked(services, access, upload, purpose)
        filename = (upload.filename or "upload").replace("\\", "/").rsplit("/", 1)[-1][:255]
    file = await services.files.add(
        data,
        owner=owner_of(request),
        salt=access.account.tenant.salt,
        filename=filename,
        purpose=purpose,
        ttl_s=ttl_s,
    )
    return JSONBody(file.to_json())


async def list_files(request: Request) -> Response:
    """GET /v1/files."""
    services, owner = services_of(request), owner_of(request)
    await services.siblings.files(owner)
    files = services.files.list(owner)
    purpose = once(request.query_params, "purpose")
    data = [file.to_json() for file in files if purpose in (None, file.purpose)]
    return JSONBody(
        {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": False,
        }
    )


async def _named(request: Request) -> StoredFile:
    services, id = services_of(request), request.path_params["id"]
    await services.siblings.file(id)
    return services.files.get(id, owner_of(request))


async def retrieve_file(request: Request) -> Response:
    """GET /v1/files/{id}."""
    file = await _named(request)
    return JSONBody(file.to_json())


async def file_content(request: Request) -> Response:
    """GET /v1/files/{id}/content: the bytes, typed by themselves and never as a page."""
    file = await _named(request)
    headers = {"x-content-type-options": "nosniff", "cache-control": "private, no-store"}
    if file.media_type is None:
        headers["content-disposition"] = "attachment"
    media_type = file.media_type or "application/octet-stream"
    return Response(await file.blob.read(), media_type=media_type, headers=headers)


async def delete_file(request: Request) -> Response:
    """DELETE /v1/files/{id}."""
    file = await _named(request)
    await services_of(request).files.remove(file.id, file.owner)
    return JSONBody({"id": file.id, "object": "file", "deleted": True})


ROUTES = [
    Route("/v1/files", create_file, methods=["POST"]),
    Route("/v1/files", list_files, methods=["GET"]),
    Route("/v1/files/{id}", retrieve_file, methods=["GET"]),
    Route("/v1/files/{id}", delete_file, methods=["DELETE"]),
    Route("/v1/files/{id}/content", file_content, methods=["GET"]),
]

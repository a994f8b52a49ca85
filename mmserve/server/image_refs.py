"""Images that requests refer to, found among what the server holds.

Owns finding an image of an earlier item, and what keeps an image's bytes. Knows nothing of prompts.
"""

from __future__ import annotations

from dataclasses import replace

from mmserve.errors import RequestError
from mmserve.server.blobs import Blob, MemoryBlob
from mmserve.server.content import ImageRef, bytes_at, uploaded
from mmserve.server.errors import NotFoundError
from mmserve.server.history import Item, StoredImage
from mmserve.server.services import Services


def of_item(ref: ImageRef, item: Item | None) -> StoredImage:
    """The image of an earlier item, shown again; its bytes are held already."""
    assert ref.item_id is not None
    if item is None:
        raise NotFoundError(
            f"Item with id '{ref.item_id[:100]}' not found.", param=ref.param, code="item_not_found"
        )
    images = item.images
    if ref.index is None and len(images) > 1:
        raise RequestError(
            f"This item has {len(images)} images; 'index' says which, from 0.", param=ref.param
        )
    if (ref.index or 0) >= len(images):
        raise RequestError(f"This item has {len(images)} images.", param=ref.param)
    image = images[ref.index or 0]
    return replace(image, param=ref.param, detail=ref.detail, number=None, item_id=None)


async def sent(ref: ImageRef, services: Services, owner: str, *, store: bool) -> StoredImage:
    """An image that comes with the request, or was uploaded. Without `store` its bytes never reach
    the disk."""
    blob: Blob
    if ref.file_id is not None:
        blob = await uploaded(ref, services, owner)
    elif store:
        blob = await services.blobs.put(await bytes_at(ref, services), services.salt(owner))
    else:
        blob = MemoryBlob(await bytes_at(ref, services))
    return StoredImage(blob, ref.param, ref.detail, ref.file_id)

"""Objects in a store of S3's kind, under the names and in the form that they have on disk.

Owns the way there, through `obstore`. Knows nothing of pools, budgets or other tiers: how much the
store keeps, and how long, is said by the bucket's own lifecycle rules.
"""

from __future__ import annotations

from typing import Any

from mmserve.tiers.disk import END, file_name, name_of


class ObjectStoreError(ValueError):
    """A store that cannot be used: why."""


class StoredObjectError(OSError):
    """An object of the store could not be read or written now."""


class ObjectStore:
    """`url`: `s3://bucket/folder`, or another of obstore's; keys come from its usual environment.

    Raises `ObjectStoreError`.
    """

    def __init__(self, url: str) -> None:
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise ObjectStoreError(
                "--kv-object-store needs obstore: pip install 'mmserve[tiers]'"
            ) from error
        self._calls: Any = obstore
        try:
            self._store = from_url(url)
        except Exception as error:  # obstore has no common class of its own for them
            raise ObjectStoreError(f"the object store {url!r} cannot be used: {error}") from error

    def names(self) -> list[bytes]:
        """All that is there. Raises `StoredObjectError`."""
        found = []
        try:
            for entries in self._calls.list(self._store):
                for entry in entries:
                    name = entry["path"].rsplit("/", 1)[-1]
                    if name.endswith(END) and (known := name_of(name)):
                        found.append(known)
        except Exception as error:
            raise StoredObjectError(f"the object store cannot be listed: {error}") from error
        return found

    def read(self, name: bytes) -> memoryview:
        try:
            return memoryview(self._calls.get(self._store, file_name(name)).bytes())
        except Exception as error:
            raise StoredObjectError(f"an object cannot be read: {error}") from error

    def write(self, name: bytes, data: bytes) -> None:
        try:
            self._calls.put(self._store, file_name(name), data)
        except Exception as error:
            raise StoredObjectError(f"an object cannot be written: {error}") from error

    def delete(self, name: bytes) -> None:
        try:
            self._calls.delete(self._store, file_name(name))
        except Exception as error:
            raise StoredObjectError(f"an object cannot be deleted: {error}") from error

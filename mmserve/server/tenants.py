"""Who holds which key, while keys come and go: the key file is read again when it has changed.

Owns accounts, which are there for good, so that what a tenant stored outlives its keys. A file that
cannot be read changes nothing. Knows nothing of HTTP.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mmserve.config import ServerConfig
from mmserve.request import EVERYBODY, Tenant
from mmserve.server.key_file import Entry, KeyFileError, digest_of, parse, read, tenant_of, together
from mmserve.server.limits import Clock, Limits, Meter

LOOK_S = 1.0  # between two looks at the key file

log = logging.getLogger("mmserve.server")


@dataclass
class Account:
    """A tenant and what it has used."""

    tenant: Tenant = EVERYBODY
    meter: Meter = field(default_factory=lambda: Meter(Limits()))


class Tenants:
    """`needs_keys`: decided at the start; a key file that has become empty opens nothing.

    Raises `KeyFileError` or OSError for a file that cannot be used from the start.
    """

    def __init__(self, config: ServerConfig, clock: Clock = time.monotonic) -> None:
        self._clock, self._path = clock, config.api_key_file
        self._fixed = [parse(key) for key in config.api_keys]
        self._fixed += [parse(key, admin=True) for key in config.admin_keys]
        self._entries: list[Entry] = []
        self._accounts: dict[str, Account] = {}
        self._seen = self._stamp()
        self._due = clock() + LOOK_S
        self._take(self._of_file())
        self.needs_keys = bool(config.api_keys) or self._path is not None
        if self._path is not None and all(entry.admin for entry in self._entries):
            raise KeyFileError("there is no key in the key file")

    def _of_file(self) -> list[Entry]:
        return [] if self._path is None else read(self._path)

    def _stamp(self) -> tuple[int, ...]:
        """Of the file, as it is now; another one where anything was written or moved there."""
        if self._path is None:
            return ()
        stat = Path(self._path).stat()
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _take(self, of_file: Iterable[Entry]) -> None:
        self._entries = together([*self._fixed, *of_file])
        for entry in self._entries:
            account = self._accounts.setdefault(entry.owner, Account())
            account.tenant = entry.tenant
            if account.meter.limits != entry.limits:
                account.meter.change(entry.limits)

    def _refresh(self) -> None:
        if self._path is None or self._clock() < self._due:
            return
        self._due = self._clock() + LOOK_S
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return
            self._seen = stamp
            self._take(self._of_file())
            log.info("the key file was read again: %d keys", len(self._entries))
        except (KeyFileError, OSError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            log.error("the key file cannot be used, and the keys stay what they were: %s", why)

    @property
    def has_admins(self) -> bool:
        self._refresh()
        return any(entry.admin for entry in self._entries)

    def find(self, key: str, *, admin: bool) -> Entry | None:
        """Whose a key is. Constant time over all keys."""
        self._refresh()
        digest = digest_of(key)
        matches = [hmac.compare_digest(digest, entry.digest) for entry in self._entries]
        found = (e for e, same in zip(self._entries, matches, strict=True) if same)
        return next((entry for entry in found if entry.admin is admin), None)

    def holds(self, entry: Entry) -> bool:
        """Whether a key that was found is still one."""
        self._refresh()
        return any(e.digest == entry.digest and e.admin is entry.admin for e in self._entries)

    def account(self, owner: str) -> Account:
        """Also of an owner that has no key any more. Without keys all are one."""
        if not self.needs_keys:
            return self._accounts.setdefault("", Account())
        if owner not in self._accounts:
            self._accounts[owner] = Account(tenant_of(owner))
        return self._accounts[owner]

"""API keys as they are written down: one a line, with what its holder may do.

    # a key, or its SHA-256     settings
    sha256:9f86d08188…          name=ann rpm=60 tpm=40000 concurrency=4
    sk-another                  name=ben share=lab weight=2
    sk-operators                admin

Owns the form and its faults, which never quote a key. Knows nothing of requests.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from mmserve.request import Tenant
from mmserve.server.limits import Limits

HASHED = "sha256:"
NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
COUNTS = {"rpm": "requests", "tpm": "tokens", "concurrency": "concurrency"}


class KeyFileError(ValueError):
    """The keys cannot be understood."""


@dataclass(frozen=True)
class Entry:
    """One key. `owner`: of what it stores; keys of one name are one owner."""

    digest: bytes  # SHA-256 of the key
    owner: str
    tenant: Tenant
    limits: Limits = Limits()
    admin: bool = False


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def _digest(word: str) -> bytes:
    if not word.startswith(HASHED):
        return digest_of(word)
    try:
        digest = bytes.fromhex(word.removeprefix(HASHED))
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise KeyFileError("behind 'sha256:' stand 64 hexadecimal digits")
    return digest


def tenant_of(owner: str, share: str | None = None, weight: float = 1.0) -> Tenant:
    """Who shares a word shares what is cached; everybody else has a salt of their own."""
    group = f"owner {owner}" if share is None else f"share {share}"
    return Tenant(owner, hashlib.sha256(f"mmserve tenant {group}".encode()).digest(), weight)


def parse(line: str, *, admin: bool = False) -> Entry:
    """Raises `KeyFileError`."""
    key, *words = line.split()
    digest, values = _digest(key), dict[str, str]()
    for word in words:
        setting, equals, value = word.partition("=")
        if word == "admin":
            admin = True
        elif not equals or setting not in (*COUNTS, "name", "share", "weight"):
            raise KeyFileError("a setting is not known (one key a line)")
        elif setting in values:
            raise KeyFileError(f"{setting} is there twice")
        elif setting in ("name", "share") and not NAME.fullmatch(value):
            raise KeyFileError(f"{setting} has letters, digits and ._@- only")
        else:
            values[setting] = value
    name = values.get("name")
    # An owner without a name must not be anybody's name.
    owner = digest.hex()[:16] if name is None else f"@{name}"
    limits = {COUNTS[k]: _count(k, v) for k, v in values.items() if k in COUNTS}
    tenant = tenant_of(owner, values.get("share"), _weight(values.get("weight", "1")))
    return Entry(digest, owner, tenant, Limits(**limits), admin)


def _count(setting: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and 0 < int(value) < 10**12):
        raise KeyFileError(f"{setting} is a whole number from 1")
    return int(value)


def _weight(value: str) -> float:
    try:
        weight = float(value)
    except ValueError:
        weight = math.nan
    if not 0.01 <= weight <= 100:
        raise KeyFileError("weight is a number from 0.01 to 100")
    return weight


def together(entries: Iterable[Entry]) -> list[Entry]:
    """Raises `KeyFileError` where keys of one owner differ in more than the key."""
    known: dict[str, Entry] = {}
    found = list(entries)
    for entry in found:
        first = known.setdefault(entry.owner, entry)
        if replace(entry, digest=first.digest) != first:
            raise KeyFileError(f"the keys of {entry.owner} have unlike settings")
    return found


def read(path: Path) -> list[Entry]:
    """Raises `KeyFileError`, with the number of the line, and OSError."""
    entries = []
    for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1):
        line = line.partition("#")[0].strip()
        try:
            entries += [parse(line)] if line else []
        except KeyFileError as error:
            raise KeyFileError(f"line {number} of the key file: {error}") from None
    return entries

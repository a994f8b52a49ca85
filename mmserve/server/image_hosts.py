"""Addresses that images may be fetched from: what a URL says, who is allowed, and what is public.

Owns the one reading of a URL (nothing parses it again behind this), the list's grammar, and which
IP addresses belong to the open internet. Strict: what two programs could read in two ways is
refused. Fetches nothing.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote

PORTS = {"https": 443, "http": 80}

_HOST = r"\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,254}"
_URL = re.compile(
    rf"(?P<scheme>https?)://(?P<host>{_HOST})(?::(?P<port>[0-9]{{1,5}}))?"
    r"(?P<target>[/?][^\s\\#\x00-\x20\x7f]*)?(?:#.*)?",
    re.IGNORECASE,
)
_RULE = re.compile(
    rf"(?:(?P<scheme>https?)://)?(?P<host>\*|(?:\*\.)?(?:{_HOST}))(?::(?P<port>[0-9]{{1,5}}))?",
    re.IGNORECASE,
)
# What ends so is read as an IPv4 address by some: 2130706433, 0177.1, 127.0.0.0x1.
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")

_OPEN_IPV6 = ipaddress.ip_network("2000::/3")  # all that has been given out for global unicast
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")  # NAT64: the last four bytes are an IPv4 address
# Not the open internet, whatever the standard library's tables of this version say.
_SPECIAL = tuple(
    ipaddress.ip_network(block)
    for block in (
        *("100.64.0.0/10", "192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15", "240.0.0.0/4"),
        *("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),
    )
)


def is_public(address: str) -> bool:
    """Whether an IP address is one of the open internet: not of this machine, a private or local
    network, a carrier's, a cloud's metadata, nor of many."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in _TRANSLATED:
            return is_public(str(ipaddress.IPv4Address(ip.packed[-4:])))
        if ip.scope_id or ip not in _OPEN_IPV6:
            return False  # mapped and compatible IPv4 addresses are outside, too
    special = any(ip in block for block in _SPECIAL if block.version == ip.version)
    return ip.is_global and not ip.is_multicast and not special


@dataclass(frozen=True)
class Address:
    """What a URL says; `host` in lower case without brackets or a last dot, `target` for the
    request line."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def authority(self) -> str:
        """For the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"


def _host(text: str) -> str:
    """Raises ValueError for what is no host name or no plainly written address."""
    if text.startswith("["):
        return str(ipaddress.IPv6Address(text[1:-1]))
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if not all(0 < len(label) <= 63 for label in labels):
        raise ValueError(f"{text[:100]!r} is no host name")
    if _NUMBER.fullmatch(labels[-1]):
        return str(ipaddress.IPv4Address(name))
    return name


def _port(text: str | None, scheme: str) -> int:
    port = PORTS[scheme] if text is None else int(text)
    if not 0 < port < 65536:
        raise ValueError(f"{port} is no port")
    return port


def parse_address(url: str) -> Address:
    """Raises ValueError for anything but a plain http or https URL without a user's name."""
    found = _URL.fullmatch(url)
    if found is None:
        raise ValueError("it is no plain http or https URL")
    scheme = found["scheme"].lower()
    target = found["target"] or "/"
    target = target if target.startswith("/") else f"/{target}"
    # Letters beyond ASCII as UTF-8; what is written with % already stays.
    target = quote(target, safe="".join(map(chr, range(0x21, 0x7F))))
    return Address(scheme, _host(found["host"]), _port(found["port"], scheme), target)


@dataclass(frozen=True)
class AllowedHost:
    """An entry of the list; `name` is a host, `*.` and the end of one, or `*` for any."""

    scheme: str
    name: str
    port: int

    def allows(self, address: Address) -> bool:
        if (address.scheme, address.port) != (self.scheme, self.port):
            return False
        if self.name.startswith("*."):
            return address.host.endswith(self.name[1:])
        return self.name in ("*", address.host)


def parse_allowed(texts: Iterable[str]) -> tuple[AllowedHost, ...]:
    """From `example.org`, `*.example.org`, `http://example.org:8080` or `*`; https where nothing
    is said. Raises ValueError."""
    rules = []
    for text in texts:
        found = _RULE.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no host such as example.org or *.example.org")
        scheme, name = (found["scheme"] or "https").lower(), found["host"]
        prefix = "*." if name.startswith("*.") else ""
        name = name if name == "*" else prefix + _host(name.removeprefix("*."))
        rules.append(AllowedHost(scheme, name, _port(found["port"], scheme)))
    return tuple(rules)

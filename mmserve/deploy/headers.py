"""Which headers belong to a request or an answer, and which to one connection (RFC 9110, 7.6.1).

Owns that list. Knows nothing of what is asked.
"""

from __future__ import annotations

from collections.abc import Iterable

Pairs = list[tuple[bytes, bytes]]

HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization"),
        *(b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    )
)
HANDSHAKE = b"sec-websocket-"


def passed_on(headers: Iterable[tuple[bytes, bytes]], *, length: bool = True) -> Pairs:
    """What goes from one connection to the next; without `length` its own is counted anew."""
    headers = [(name.lower(), value) for name, value in headers]
    named = {
        each.strip().lower()
        for name, value in headers
        if name == b"connection"
        for each in value.split(b",")
    }
    gone = HOP | named | (frozenset() if length else {b"content-length"})
    return [(name, value) for name, value in headers if name not in gone]


def without_handshake(headers: Pairs) -> Pairs:
    """Of a WebSocket's opening, without what its own client library writes."""
    return [(name, value) for name, value in headers if not name.startswith(HANDSHAKE)]

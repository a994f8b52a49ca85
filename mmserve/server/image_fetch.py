"""Images fetched from http(s) URLs, where the operator lists the hosts.

Owns the fetching: each hop's URL is held against the list, each name is resolved once, every
address of it must be public, and the address that was checked is the one that is dialled. Time,
bytes and redirects are bounded; no cookie, credential or proxy is ever used. Knows nothing of
requests; what came is judged by its bytes, as anything else.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any
from urllib.parse import urljoin

import anyio
import certifi
import httpcore

from mmserve import __version__
from mmserve.errors import ImageTooLargeError, RequestError
from mmserve.server.errors import ImageURLNotAllowedError, InvalidImageURLError
from mmserve.server.image_hosts import Address, is_public, parse_address, parse_allowed

MAX_SECONDS = 10.0  # for an image, all redirects together
MAX_REDIRECTS = 3
MAX_AT_ONCE = 16  # fetches of one server
MAX_DIALLED = 4  # of a name's addresses
MAX_URL = 8192  # characters
REDIRECTS = (301, 302, 303, 307, 308)
HEADERS = {
    "User-Agent": f"mmserve/{__version__}",
    "Accept": "image/png, image/jpeg, image/webp, image/gif",
    "Accept-Encoding": "identity",  # nothing to unpack, so nothing that grows
    "Connection": "close",
}

Resolve = Callable[[str, int], Awaitable[list[str]]]


class PrivateAddressError(Exception):
    """A name that leads to an address which is not of the open internet."""


class SystemResolver:
    """The machine's own, on threads that it may keep waiting."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="resolve")

    async def __call__(self, host: str, port: int) -> list[str]:
        def look_up() -> list[str]:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return list(dict.fromkeys(str(entry[4][0]) for entry in found))

        return await asyncio.get_running_loop().run_in_executor(self._threads, look_up)


class PublicNetwork(httpcore.AsyncNetworkBackend):
    """Dials public addresses, and none that it has not just checked."""

    def __init__(self, resolve: Resolve, dial: httpcore.AsyncNetworkBackend) -> None:
        self._resolve = resolve
        self._dial = dial

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        addresses = await self._resolve(host, port)
        if not addresses or not all(map(is_public, addresses)):
            raise PrivateAddressError
        failure: Exception = httpcore.ConnectError()
        for address in addresses[:MAX_DIALLED]:
            try:
                return await self._dial.connect_tcp(address, port, timeout)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        raise PrivateAddressError

    async def sleep(self, seconds: float) -> None:
        await self._dial.sleep(seconds)


class ImageFetcher:
    """`hosts`: who may be asked, as `parse_allowed` reads it; nobody where it is empty.

    Raises ValueError for an entry that is no host.
    """

    def __init__(
        self,
        hosts: Iterable[str],
        *,
        resolve: Resolve | None = None,
        dial: httpcore.AsyncNetworkBackend | None = None,
        trusted: str | None = None,
    ) -> None:
        """`trusted`: a file of certificates instead of the public authorities'."""
        self._rules = parse_allowed(hosts)
        self._network = PublicNetwork(resolve or SystemResolver(), dial or httpcore.AnyIOBackend())
        self._trusted = trusted or certifi.where()
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)

    async def fetch(self, url: str, max_bytes: int, param: str) -> bytes:
        """The bytes at a URL. Raises `ImageURLNotAllowedError`, `InvalidImageURLError` or
        `ImageTooLargeError`, each with `param`."""
        try:
            address = self._allowed(url)
            with anyio.fail_after(MAX_SECONDS):
                async with self._turns:
                    return await self._follow(address, max_bytes)
        except RequestError as error:
            error.param = param
            raise
        except PrivateAddressError:
            raise ImageURLNotAllowedError(
                "The image's URL does not lead to a public address.", param=param
            ) from None
        except (TimeoutError, httpcore.TimeoutException):
            raise InvalidImageURLError(
                f"The image did not come within {MAX_SECONDS:g} s.", param=param
            ) from None
        except (OSError, httpcore.NetworkError, httpcore.ProtocolError, UnicodeError):
            raise InvalidImageURLError(
                "The image cannot be fetched: its server does not answer as one should.",
                param=param,
            ) from None

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self._trusted)

    def _allowed(self, url: str, base: Address | None = None) -> Address:
        """What a URL says, which may be written as seen from another."""
        if not self._rules:
            raise ImageURLNotAllowedError(
                "Images are given as data URLs or uploaded files; addresses are not fetched."
            )
        try:
            if len(url) > MAX_URL:
                raise ValueError(f"it has more than {MAX_URL} characters")
            address = parse_address(url if base is None else urljoin(base.url, url))
        except ValueError as error:
            raise ImageURLNotAllowedError(f"The image's URL cannot be fetched: {error}.") from None
        if not any(rule.allows(address) for rule in self._rules):
            raise ImageURLNotAllowedError(
                f"Images are not fetched from {address.scheme}://{address.authority}."
            )
        return address

    async def _follow(self, address: Address, max_bytes: int) -> bytes:
        for _ in range(1 + MAX_REDIRECTS):
            found = await self._get(address, max_bytes)
            if isinstance(found, bytes):
                return found
            address = self._allowed(found, address)
        raise InvalidImageURLError(f"The image's URL leads on more than {MAX_REDIRECTS} times.")

    async def _get(self, address: Address, max_bytes: int) -> bytes | str:
        """The body, or where a redirect leads. Nothing is shared by two requests."""
        pool = httpcore.AsyncConnectionPool(
            ssl_context=self._tls, network_backend=self._network, max_connections=1
        )
        url = httpcore.URL(
            scheme=address.scheme, host=address.host, port=address.port, target=address.target
        )
        headers = {"Host": address.authority, **HEADERS}
        async with pool, pool.stream("GET", url, headers=list(headers.items())) as response:
            said = {name.lower(): value for name, value in response.headers}
            if response.status in REDIRECTS and b"location" in said:
                return said[b"location"].decode("ascii")
            if response.status != 200:
                raise InvalidImageURLError(f"The image's server answers {response.status}.")
            if said.get(b"content-encoding", b"identity") != b"identity":
                raise InvalidImageURLError("The image's server packs it, which was not asked for.")
            return await _body(response, max_bytes)


async def _body(response: httpcore.Response, max_bytes: int) -> bytes:
    """Raises `ImageTooLargeError` as soon as there is more."""
    made = bytearray()
    async for part in response.aiter_stream():
        made += part
        if len(made) > max_bytes:
            raise ImageTooLargeError(
                f"The image is larger than {max_bytes / 2**20:g} MiB, which is the limit."
            )
    if not made:
        raise InvalidImageURLError("The image's server answers with nothing.")
    return bytes(made)

"""Servers on this machine in the part of hosts on the open internet, and those nobody may reach."""

from __future__ import annotations

import http.server
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import httpcore

FAR = "93.184.216.34"  # a public address, which is never really dialled

Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


class Dialler(httpcore.AsyncNetworkBackend):
    """Leads `FAR` to a server here, and everything else where it says."""

    def __init__(self, port: int | None = None) -> None:
        self._port = port
        self._real = httpcore.AnyIOBackend()
        self.dialled: list[str] = []

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        self.dialled.append(host)
        if host == FAR and self._port is not None:
            host, port = "127.0.0.1", self._port
        return await self._real.connect_tcp(host, port, timeout)


class Names:
    """A resolver that gives each look-up of a name the next of its answers."""

    def __init__(self, *answers: list[str]) -> None:
        self._answers = answers
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        return self._answers[min(len(self.asked), len(self._answers)) - 1]


@contextmanager
def far_host(answer: Answer, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """A web server that answers as told; its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def body(data: bytes, **headers: str) -> Answer:
    def send(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(data)

    return send


def redirect(location: str, status: int = 302) -> Answer:
    def send(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        request.send_header("Set-Cookie", "seen=1; Domain=example.org; Path=/")
        request.send_header("Location", location)
        request.send_header("Content-Length", "0")
        request.end_headers()

    return send


class Trap:
    """Listens where nobody may come, and counts who does."""

    def __init__(self, listening: list[socket.socket]) -> None:
        self._listening = listening
        self.port: int = listening[0].getsockname()[1]

    def visits(self) -> int:
        count = 0
        for listener in self._listening:
            listener.setblocking(False)
            try:
                while True:
                    listener.accept()[0].close()
                    count += 1
            except BlockingIOError:
                pass
        return count


@contextmanager
def trap() -> Iterator[Trap]:
    """On every address of this machine, of both protocols where it has them."""
    with closing(socket.create_server(("0.0.0.0", 0))) as four:
        listening = [four]
        try:
            where = ("::", four.getsockname()[1])
            listening.append(socket.create_server(where, family=socket.AF_INET6))
        except OSError:  # this machine has no IPv6
            pass
        try:
            yield Trap(listening)
        finally:
            for listener in listening:
                listener.close()

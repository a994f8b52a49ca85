"""Ten thousand idle sockets on one process, a thousand streams at once: each whole and in order.

A server over the tiny model runs in a process of its own; the clients speak raw sockets, so that
they are no heavier than what they look at.

Run: python tests/checks/crowd.py [--sockets 10000] [--streams 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))

QUESTIONS = 20  # that differ, and so do their answers
SPARE = 100  # files of a process beside its connections
TOKENS = 16  # of an answer
AT_ONCE = 200  # handshakes under way
PING, PONG, TEXT = 0x89, 0x8A, 0x81  # first bytes of frames


def serve() -> None:
    """The process that is looked at."""
    import torch

    from mmserve.config import ServerConfig
    from mmserve.engine.async_engine import AsyncEngine
    from mmserve.server.runner import allow_many_files, make_server
    from tests.engine.tiny import build_telling, tiny_config

    allow_many_files()
    torch.set_num_threads(1)  # so small a model gains nothing from more
    engine = AsyncEngine(tiny_config(text_pages=1000, max_waiting=20_000), build_telling)
    config = ServerConfig(port=0, sockets_per_key=100_000, host_memory_limit=0)
    make_server(config, engine).run()


@contextmanager
def served(script: str = __file__, *args: str) -> Iterator[tuple[str, int, psutil.Process]]:
    command = [sys.executable, script, "--serve", *args]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert "ready: http" in line, "the server has not started"
        where = urlsplit(line.split()[-1])
        assert where.hostname is not None and where.port is not None
        yield where.hostname, where.port, psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def frame(text: str) -> bytes:
    """A text frame of a client, under a mask of zeros."""
    data = text.encode()
    assert len(data) < 65536
    length = (
        bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + len(data).to_bytes(2, "big")
    )
    return bytes([TEXT]) + length + bytes(4) + data


class Socket(asyncio.Protocol):
    """A WebSocket that answers pings and keeps what it is told."""

    def __init__(self) -> None:
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        key = base64.b64encode(os.urandom(16)).decode()
        host = "{}:{}".format(*transport.get_extra_info("peername")[:2])
        transport.write(
            f"GET /v1/responses HTTP/1.1\r\nhost: {host}\r\nupgrade: websocket\r\n"
            f"connection: upgrade\r\nsec-websocket-key: {key}\r\n"
            "sec-websocket-version: 13\r\n\r\n".encode()
        )

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self.opened.done():
            if b"\r\n\r\n" not in self._data:
                return
            head, _, self._data = self._data.partition(b"\r\n\r\n")
            assert b" 101 " in head, head
            self.opened.set_result(None)
        while (end := self._end()) is not None:
            start, whole = end
            kind, body = self._data[0], self._data[start:whole]
            self._data = self._data[whole:]
            if kind == PING:
                self.transport.write(bytes([PONG, 0x80 | len(body)]) + bytes(4) + body)
            elif kind == TEXT:
                self.told.put_nowait(json.loads(body))

    def _end(self) -> tuple[int, int] | None:
        """Where the first frame's data begin and end, once it is whole."""
        if len(self._data) < 4:
            return (2, 2) if len(self._data) >= 2 and self._data[1] == 0 else None
        length, start = self._data[1], 2
        if length >= 126:
            start = 4 if length == 126 else 10
            length = int.from_bytes(self._data[2:start], "big")
        return (start, start + length) if len(self._data) >= start + length else None


def question(number: int) -> dict[str, Any]:
    """Drawn by a seed: the likeliest answers of so small a model are often the same."""
    drawn = {"temperature": 1, "seed": number % QUESTIONS}
    limits = {"max_output_tokens": TOKENS, "ignore_eos": True, "store": False}
    return {"input": f"What is {number % QUESTIONS}?", **limits, **drawn}


class Events(NamedTuple):
    """Of one response: its text, when it is whole and in order."""

    text: str

    @classmethod
    def of(cls, events: list[dict[str, Any]]) -> Events:
        numbers = [event["sequence_number"] for event in events]
        assert numbers == list(range(len(events))), "events are missing, or out of order"
        deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
        response = events[-1]["response"]
        assert response["status"] == "incomplete", response["error"]
        text = response["output"][0]["content"][0]["text"]
        assert "".join(deltas) == text
        return cls(text)


async def stream(host: str, port: int, number: int) -> Events:
    reader, writer = await asyncio.open_connection(host, port)
    data = json.dumps({**question(number), "stream": True}).encode()
    head = f"POST /v1/responses HTTP/1.1\r\nhost: {host}:{port}\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    events = []
    while line := await reader.readline():
        if line.startswith(b"data: "):
            events.append(json.loads(line[6:]))
    writer.close()
    return Events.of(events)


async def by_socket(socket: Socket, number: int) -> Events:
    socket.transport.write(frame(json.dumps({"type": "response.create", **question(number)})))
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] != "response.incomplete":
        events.append(await socket.told.get())
    return Events.of(events)


async def check_streams(host: str, port: int, count: int) -> float:
    """All at once, each as alone; seconds that it took."""
    alone = [await stream(host, port, n) for n in range(QUESTIONS)]
    assert len(set(alone)) == QUESTIONS, "a stream could not be told from another"
    began = time.monotonic()
    found = await asyncio.gather(*(stream(host, port, n) for n in range(count)))
    took = time.monotonic() - began
    for number, events in enumerate(found):
        assert events == alone[number % QUESTIONS], f"stream {number} is another's"
    return took


async def check_sockets(host: str, port: int, count: int, process: psutil.Process) -> int:
    """All stay open while one of a hundred talks; bytes of the server for each."""
    loop, gate = asyncio.get_running_loop(), asyncio.Semaphore(AT_ONCE)

    async def one() -> Socket:
        async with gate:
            _, socket = await loop.create_connection(Socket, host, port)
            await socket.opened
            return socket

    first = await one()
    alone = [await by_socket(first, n) for n in range(QUESTIONS)]
    before = process.memory_info().rss
    sockets = await asyncio.gather(*(one() for _ in range(count - 1)))
    each = int(process.memory_info().rss - before) // max(count - 1, 1)
    talking = sockets[:: max(len(sockets) // 100, 1)]
    found = await asyncio.gather(*(by_socket(s, n) for n, s in enumerate(talking)))
    assert [e.text for e in found] == [alone[n % QUESTIONS].text for n in range(len(found))]
    assert not any(s.transport.is_closing() for s in sockets), "a socket was closed"
    assert await open_sockets(host, port) == count
    return each


async def open_sockets(host: str, port: int) -> int:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(
        f"GET /metrics HTTP/1.1\r\nhost: {host}:{port}\r\nconnection: close\r\n\r\n".encode()
    )
    shown = (await reader.read()).decode()
    writer.close()
    line = next(x for x in shown.splitlines() if x.startswith("mmserve:websockets_open "))
    return int(float(line.split()[-1]))


def allow(files: int) -> None:
    """To be open at once in this process, as in the server."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < files:
        raise SystemExit(
            f"A process may have {most} files open here, and {files} are needed: raise the hard "
            f"limit (ulimit -Hn {files}), or ask for fewer with --sockets and --streams."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def check(sockets: int, streams: int) -> tuple[int, float]:
    """Bytes of the server for each socket, and seconds that all streams took."""

    async def both(host: str, port: int, process: psutil.Process) -> tuple[int, float]:
        took = await check_streams(host, port, streams)
        return await check_sockets(host, port, sockets, process), took

    allow(max(sockets, streams) + SPARE)
    with served() as (host, port, process):
        return asyncio.run(both(host, port, process))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sockets", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve()
    each, took = check(args.sockets, args.streams)
    print(
        f"{args.streams} streams of {TOKENS} tokens at once, whole and in order, in {took:.1f} s; "
        f"{args.sockets} sockets, {each / 1024:.1f} KiB each of the server"
    )


if __name__ == "__main__":
    main()

"""A WebSocket passed on to a replica: frames in both directions, refusals and closes as they are.

Owns one socket. A replica's refusal of the handshake is the client's; a replica that ends without a
word closes with 1012, upon which clients come again. Where the first frame says that another
replica has the conversation, that one is dialled before any frame was passed on. Knows nothing of
who is chosen.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from starlette.types import Message, Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidStatus,
    InvalidURI,
)
from websockets.typing import Origin, Subprotocol

from mmserve.deploy.directory import Facts
from mmserve.deploy.headers import passed_on, without_handshake
from mmserve.deploy.http_pass import CONNECT_S, target

log = logging.getLogger("mmserve.deploy")

AGAIN = 1012  # service restart
UNSAID = (1005, 1006, 1015)  # codes that stand for no code, and are never sent
SILENCE_S = 30.0
UNREACHED = (OSError, TimeoutError, EOFError)

Better = Callable[[str | bytes], Facts | None]


class _LeftError(Exception):
    """The client has gone before it asked for anything."""


class Relay:
    """`open`: counts sockets by replica."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, open: Counter[str]) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._open = open
        self._left = False  # the client has

    async def run(
        self,
        candidates: Sequence[Facts],
        better: Better | None,
        failed: Callable[[Facts], None],
    ) -> None:
        """`better`: who has what the first frame asks for, if not who was dialled."""
        assert (await self._receive())["type"] == "websocket.connect"
        upstream, replica = await self._first(candidates, failed)
        if upstream is None or replica is None:
            return
        chosen = upstream.subprotocol
        await self._send({"type": "websocket.accept", "subprotocol": chosen, "headers": []})
        try:
            if better is not None:
                upstream, replica = await self._moved(upstream, replica, better, failed)
            self._open[replica.name] += 1
            try:
                await self._both(upstream)
            finally:
                self._open[replica.name] -= 1
        except _LeftError:
            pass
        finally:
            await upstream.close()

    async def _first(
        self, candidates: Sequence[Facts], failed: Callable[[Facts], None]
    ) -> tuple[ClientConnection | None, Facts | None]:
        for number, replica in enumerate(candidates, 1):
            try:
                return await self._dial(replica), replica
            except UNREACHED:
                failed(replica)
            except InvalidStatus as error:
                if error.response.status_code == 503 and number < len(candidates):
                    continue
                await self._deny(error)
                return None, None
            except (InvalidHandshake, InvalidURI) as error:
                log.warning("%s does not speak: %s", replica.name, error)
        await self._refuse()
        return None, None

    async def _dial(self, replica: Facts) -> ClientConnection:
        at = target(replica, self._scope)
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in without_handshake(passed_on(self._scope["headers"]))
        ]
        said = dict(headers)
        offered = [Subprotocol(each) for each in self._scope.get("subprotocols", ())]
        return await connect(
            # The client's own Host, over a connection to the replica.
            f"ws://{said.get('host', 'localhost')}{at.target.decode('ascii')}",
            host=at.host.decode("ascii"),
            port=at.port,
            origin=Origin(said["origin"]) if "origin" in said else None,
            additional_headers=[each for each in headers if each[0] not in ("host", "origin")],
            subprotocols=offered or None,
            compression=None,
            user_agent_header=None,
            proxy=None,
            max_size=None,  # a replica's own events
            open_timeout=CONNECT_S,
            ping_interval=SILENCE_S,  # a machine that is gone says nothing
            ping_timeout=SILENCE_S,
            close_timeout=CONNECT_S,
        )

    async def _moved(
        self,
        upstream: ClientConnection,
        replica: Facts,
        better: Better,
        failed: Callable[[Facts], None],
    ) -> tuple[ClientConnection, Facts]:
        """Connected to who has the conversation, the first frame sent."""
        message = await self._receive()
        if message["type"] != "websocket.receive":
            raise _LeftError
        frame = _frame(message)
        other = better(frame)
        if other is not None and other.name != replica.name:
            try:
                moved = await self._dial(other)
            except (*UNREACHED, InvalidHandshake):
                failed(other)  # whom it was connected to goes on from what all share
            else:
                await upstream.close()
                upstream, replica = moved, other
        try:
            await upstream.send(frame)
        except ConnectionClosed:
            pass  # said where it is read
        return upstream, replica

    async def _both(self, upstream: ClientConnection) -> None:
        tasks = [
            asyncio.ensure_future(self._outward(upstream)),
            asyncio.ensure_future(self._inward(upstream)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _outward(self, upstream: ClientConnection) -> None:
        """From the client, until it leaves."""
        while True:
            message = await self._receive()
            if message["type"] != "websocket.receive":
                self._left = True
                code = message.get("code") or 1000
                await upstream.close(1000 if code in UNSAID else code)
                return
            try:
                await upstream.send(_frame(message))
            except ConnectionClosed:
                await asyncio.Event().wait()  # the other direction tells why, and ends this

    async def _inward(self, upstream: ClientConnection) -> None:
        """From the replica, until it closes."""
        try:
            while True:
                frame = await upstream.recv()
                kind = "text" if isinstance(frame, str) else "bytes"
                await self._send({"type": "websocket.send", kind: frame})
        except ConnectionClosed as closed:
            code, said = AGAIN, ""
            if closed.rcvd is not None:
                code, said = closed.rcvd.code, closed.rcvd.reason
            code = 1000 if code in UNSAID else code
            if not self._left:
                await self._send({"type": "websocket.close", "code": code, "reason": said})

    async def _deny(self, error: InvalidStatus) -> None:
        response = error.response
        raw = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in response.headers.raw_items()]
        await self._answer(response.status_code, passed_on(raw), bytes(response.body or b""))

    async def _refuse(self) -> None:
        await self._answer(503, [(b"retry-after", b"5")], b"")

    async def _answer(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        if "websocket.http.response" not in self._scope.get("extensions", {}):
            return await self._send({"type": "websocket.close", "code": 1008, "reason": ""})
        kind = "websocket.http.response"
        start: Message = {"type": f"{kind}.start", "status": status, "headers": headers}
        await self._send(start)
        await self._send({"type": f"{kind}.body", "body": body})


def _frame(message: Message) -> str | bytes:
    text = message.get("text")
    frame: str | bytes = message["bytes"] if text is None else text
    return frame

"""One client of the soak: it asks, leaves, comes back and sends rubbish, and checks what it gets.

Owns the acts and the book in which all clients write. Knows nothing of how many they are, nor of
what may be called good.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect

from tests.checks.served import input_parts, picture, user

TIMEOUT_S = 300
TOKENS = 12  # of an answer
NUMBERS = 12  # questions of each kind, each with a picture of its own where the kind has pictures
ENDED = ("response.completed", "response.incomplete", "response.failed")
DELTA = "response.output_text.delta"
OPTIONS = {"temperature": 0, "ignore_eos": True}


class Fault(Exception):
    """What no client should see."""


class Refused(Exception):
    """Not now: a 429 or 503 that says when."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


Firsts = defaultdict[tuple[str, str], list[float]]


@dataclass
class Book:
    """What all clients have seen. While `learning`, answers are taken for right."""

    learning: bool = True
    answers: dict[tuple[str, int], str] = field(default_factory=dict)  # by kind and number
    wrong: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    acts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)  # by key
    tokens: Counter[str] = field(default_factory=Counter)  # computed, of whole answers, by key
    # Seconds to first tokens, by kind and key: as the client saw them, and as the server says.
    firsts: Firsts = field(default_factory=lambda: defaultdict(list))
    served: Firsts = field(default_factory=lambda: defaultdict(list))

    def heard(self, kind: str, number: int, text: str, *, whole: bool = True) -> None:
        if self.learning:
            self.answers[kind, number] = text
            return
        right = self.answers[kind, number]
        if text != (right if whole else right[: len(text)]):
            self.wrong.append(f"{kind} {number}: {text!r}, alone {right!r}")


class Heard:
    """An answer on its way: when it began, its text, what it took."""

    def __init__(self, book: Book, kind: str, key: str) -> None:
        self._book, self._kind, self._key = book, kind, key
        self._asked = time.monotonic()
        self.text = ""

    def add(self, delta: str) -> None:
        if delta and not self.text and not self._book.learning:
            took = time.monotonic() - self._asked
            self._book.firsts[self._kind, self._key].append(took)
        self.text += delta

    def end(self, usage: dict[str, Any], timings: dict[str, float]) -> None:
        if not self._book.learning:
            took = (timings["queue_ms"] + timings["prompt_ms"]) / 1e3
            self._book.served[self._kind, self._key].append(took)
        given, details = ("prompt", "completion"), "prompt_tokens_details"
        if "input_tokens" in usage:
            given, details = ("input", "output"), "input_tokens_details"
        read, written = (usage[f"{word}_tokens"] for word in given)
        self._book.tokens[self._key] += read - usage[details]["cached_tokens"] + written


class Client:
    """With a key; a context that ends its connections."""

    def __init__(self, url: str, key: str, book: Book, seed: int) -> None:
        headers = {"authorization": f"Bearer {key}"}
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S)
        self._socket_url = url.replace("http", "ws", 1) + "/v1/responses"
        self._headers, self._key = headers, key.split("-")[1]
        self._book, self._random = book, random.Random(seed)
        self.doing = "nothing"

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def act(self, kind: str, number: int) -> None:
        """Raises `Refused`; all that should not be raises others."""
        self.doing = f"{kind} {number}"
        await getattr(self, kind)(number)
        self._book.acts[kind] += 1

    async def any(self) -> None:
        kinds = ("chat", "response", "socket", "abort", "resume", "forget", "rubbish")
        (kind,) = self._random.choices(kinds, (5, 5, 4, 3, 3, 1, 2))
        try:
            await self.act(kind, self._random.randrange(NUMBERS))
        except Refused:
            self._book.refused[self._key] += 1
            raise

    async def chat(self, number: int) -> None:
        """A picture, streamed."""
        heard = Heard(self._book, "chat", self._key)
        async for chunk in self._chat(number):
            for choice in chunk["choices"]:
                heard.add(choice["delta"].get("content") or "")
            if chunk.get("usage"):
                heard.end(chunk["usage"], chunk["timings"])
        self._book.heard("chat", number, heard.text)

    async def abort(self, number: int) -> None:
        """Gone in mid-answer."""
        text, left = "", self._random.randrange(TOKENS)
        async with aclosing(self._chat(number)) as chunks:
            async for chunk in chunks:
                text += "".join(c["delta"].get("content") or "" for c in chunk["choices"])
                left -= 1
                if left < 0:
                    break
        self._book.heard("chat", number, text, whole=False)

    async def response(self, number: int) -> None:
        """Text alone, streamed."""
        body = _response(f"How much is {number} and {number}?", store=False)
        await self._hear("response", number, self._stream("POST", "/v1/responses", body))

    async def socket(self, number: int) -> None:
        """Two pictures, two answers on one socket."""
        async with self._connect() as socket:
            for each in (number, (number + 1) % NUMBERS):
                await self._hear("socket", each, _by_socket(socket, _shown(each, store=False)))

    async def resume(self, number: int) -> None:
        """A socket that is lost in mid-answer, and the rest by HTTP."""
        text, id, last, left = "", "", 0, self._random.randrange(2, TOKENS)
        async with self._connect() as socket:
            async for event in _by_socket(socket, _shown(number, store=True)):
                id, last = id or event["response"]["id"], event["sequence_number"]
                text += event["delta"] if event["type"] == DELTA else ""
                left -= 1
                if left < 0:
                    break
            socket.transport.abort()
        path = f"/v1/responses/{id}?stream=true&starting_after={last}"
        async for event in self._stream("GET", path):
            text += event["delta"] if event["type"] == DELTA else ""
        self._book.heard("socket", number, text)
        await self._expect(200, "DELETE", f"/v1/responses/{id}")

    async def forget(self, number: int) -> None:
        """Two pictures; the first is forgotten, and the talk goes on."""
        pictures = (picture(number), picture(number + 1))
        body = _response(*pictures, "What are these?", store=True)
        first = await self._hear("first turn", number, self._stream("POST", "/v1/responses", body))
        path = f"/v1/responses/{first}/images"
        shown = await self._expect(200, "GET", path)
        how = {"mode": ("recompute", "mark")[number % 2]}
        image = shown["data"][0]["sha256"]
        await self._expect(200, "POST", f"{path}/{image}/forget", json=how)
        body = _response("And now?", store=True) | {"previous_response_id": first}
        stream = self._stream("POST", "/v1/responses", body)
        second = await self._hear("next turn", number, stream)
        for id in (second, first):
            await self._expect(200, "DELETE", f"/v1/responses/{id}")

    async def rubbish(self, number: int) -> None:
        """Wrong JSON, a broken picture, unknown names: each refused with its status."""
        if number % 4 == 0:
            await self._expect(400, "POST", "/v1/chat/completions", content=b'{"messages": [')
        elif number % 4 == 1:
            body = _chat(user(picture(number)[: 60 + number], "What?"))
            await self._expect(400, "POST", "/v1/chat/completions", json=body)
        elif number % 4 == 2:
            await self._expect(404, "GET", f"/v1/responses/resp_{number:032}")
        else:
            body = _response("And?", store=False) | {"previous_response_id": f"resp_{number:032}"}
            await self._expect(400, "POST", "/v1/responses", json=body)

    def _connect(self) -> connect:
        # How long a handshake or a pong takes is not looked at: a busy machine is no fault.
        return connect(
            self._socket_url,
            additional_headers=self._headers,
            open_timeout=TIMEOUT_S,
            ping_interval=None,
        )

    def _chat(self, number: int) -> AsyncGenerator[dict[str, Any]]:
        body = _chat(user(picture(number), "What shape is it?"))
        return self._stream("POST", "/v1/chat/completions", body)

    async def _hear(self, kind: str, number: int, events: AsyncIterator[dict[str, Any]]) -> str:
        """The response's id."""
        heard = Heard(self._book, kind, self._key)
        response: dict[str, Any] = {}
        async for event in events:
            if event["type"] == DELTA:
                heard.add(event["delta"])
            response = event.get("response", response)
        if response.get("status") != "incomplete":  # at its limit of tokens
            raise Fault(f"{kind} {number} has ended as {response}")
        heard.end(response["usage"], response["timings"])
        self._book.heard(kind, number, heard.text)
        id: str = response["id"]
        return id

    async def _stream(
        self, method: str, path: str, body: Any = None
    ) -> AsyncGenerator[dict[str, Any]]:
        async with self._http.stream(method, path, json=body) as answer:
            await _check(answer, 200)
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line[6:])

    async def _expect(self, status: int, method: str, path: str, **sent: Any) -> Any:
        answer = await self._http.request(method, path, **sent)
        await _check(answer, status)
        return answer.json()


async def _check(answer: httpx.Response, status: int) -> None:
    """Raises `Refused` and `Fault`."""
    if answer.status_code == status:
        return
    if answer.status_code in (429, 503) and "retry-after" in answer.headers:
        raise Refused(float(answer.headers["retry-after"]))
    await answer.aread()
    raise Fault(f"{answer.request.url.path}: {answer.status_code} {answer.text[:300]}")


def _chat(message: dict[str, Any]) -> dict[str, Any]:
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": "tiny", "messages": [message], "max_tokens": TOKENS, **usage, **OPTIONS}


def _response(*parts: bytes | str, store: bool) -> dict[str, Any]:
    content = [{"role": "user", "content": input_parts(*parts)}]
    limits = {"max_output_tokens": TOKENS, "stream": True, "store": store}
    return {"input": content, **limits, **OPTIONS}


def _shown(number: int, *, store: bool) -> dict[str, Any]:
    return _response(picture(number), picture(number + NUMBERS), "Which one?", store=store)


async def _by_socket(
    socket: ClientConnection, body: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """Raises `Refused` and `Fault`."""
    asked = {k: v for k, v in body.items() if k != "stream"}
    await socket.send(json.dumps({"type": "response.create", **asked}))
    async for data in socket:
        event = json.loads(data)
        if event["type"] == "error":
            if event.get("status") in (429, 503):
                raise Refused(1)
            raise Fault(str(event))
        yield event
        if event["type"] in ENDED:
            return
    raise Fault("the socket was closed in mid-answer")

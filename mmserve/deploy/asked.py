"""Where a request belongs, as far as it says so itself: the replica whose ids it names, the
pictures that it shows, how its text begins.

Owns reading a request for its router's sake: leniently, as the replica is who refuses. Knows
nothing of which replicas there are.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

PREFIX_CHARACTERS = 4096
MAX_DEPTH = 16
STORED_ID = re.compile(r"(?:resp|file)_([a-z0-9]{1,16})_[0-9a-f]{32}")
# What names a conversation that is kept where it began, in the order in which they are believed.
PARENTS = ("previous_response_id", "response_id")


@dataclass(frozen=True)
class Asked:
    """`home`: the replica that keeps what is named. `votes`: replicas of uploads, one each.
    `session`: what the client calls the conversation."""

    home: str | None = None
    session: str | None = None
    digests: tuple[str, ...] = ()
    votes: tuple[str, ...] = ()
    prefix: str = ""


def replica_of(id: object) -> str | None:
    """Where a response or an upload was first kept."""
    found = STORED_ID.fullmatch(id) if isinstance(id, str) else None
    return None if found is None else found[1]


def of_path(path: str) -> Asked:
    """A request whose path alone says it, such as `GET /v1/responses/{id}`."""
    homes = (replica_of(part) for part in path.split("/"))
    return Asked(home=next((home for home in homes if home), None))


def of_json(body: bytes | str) -> Asked:
    """A chat completion's or response's body, or a frame that asks for one."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return Asked()
    return of_object(value) if isinstance(value, dict) else Asked()


def of_object(body: dict[str, Any]) -> Asked:
    inner = body.get("response")
    fields = {**inner, **body} if isinstance(inner, dict) else body
    home = next((home for name in PARENTS if (home := replica_of(fields.get(name)))), None)
    session = fields.get("prompt_cache_key")
    seen = _Seen()
    for name in ("instructions", "messages", "input", "prompt"):
        seen.walk(fields.get(name), 0)
    return Asked(
        home,
        session if isinstance(session, str) and session else None,
        tuple(dict.fromkeys(seen.digests)),
        tuple(seen.votes),
        "".join(seen.texts)[:PREFIX_CHARACTERS],
    )


async def of_form(headers: Headers, body: bytes) -> Asked:
    """An upload: it is kept where its picture belongs."""

    async def stream() -> Any:
        yield body

    try:
        form = await MultiPartParser(headers, stream(), max_files=1).parse()
    except (MultiPartException, KeyError):
        return Asked()
    async with form_closed(form):
        file = form.get("file")
        data = await file.read() if isinstance(file, UploadFile) else b""
    return Asked(digests=(hashlib.sha256(data).hexdigest(),)) if data else Asked()


class form_closed:
    """A form's temporary files, gone afterwards."""

    def __init__(self, form: Any) -> None:
        self._form = form

    async def __aenter__(self) -> None: ...
    async def __aexit__(self, *_: object) -> None:
        await self._form.close()


class _Seen:
    """What the parts of messages hold: all pictures, and the text up to the first answer's."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.votes: list[str] = []
        self.texts: list[str] = []
        self._open = True  # texts of the first turn

    def walk(self, value: Any, depth: int) -> None:
        if depth > MAX_DEPTH:
            return
        if isinstance(value, str):
            self._text(value)
        elif isinstance(value, list):
            for each in value:
                self.walk(each, depth + 1)
        elif isinstance(value, dict):
            self._object(value, depth)

    def _object(self, value: dict[str, Any], depth: int) -> None:
        if value.get("role") == "assistant":
            self._open = False
        for picture in _pictures(value):
            self._picture(picture)
        for name in ("content", "text"):
            self.walk(value.get(name), depth + 1)

    def _picture(self, name: str) -> None:
        if (home := replica_of(name)) is not None:
            self.votes.append(home)
        else:
            self.digests.append(digest(name))

    def _text(self, text: str) -> None:
        if self._open:
            self.texts.append(text)


def _pictures(part: dict[str, Any]) -> Iterator[str]:
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, dict) else url
    file = part.get("file")
    file = file if isinstance(file, dict) else {}
    names = (url, part.get("file_id"), file.get("file_id"), file.get("file_data"))
    yield from (name for name in names if isinstance(name, str) and name)


def digest(picture: str) -> str:
    """Of a data URL's bytes, as the vision pool knows them; of anything else, of its name."""
    data = picture.encode("utf-8", "replace")
    if picture.startswith("data:"):
        head, _, body = picture.partition(",")
        if head.endswith(";base64"):
            try:
                data = base64.b64decode(body)
            except (binascii.Error, ValueError):
                pass  # the replica will say what is wrong with it
    return hashlib.sha256(data).hexdigest()

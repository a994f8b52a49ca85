"""Examples as requests: asks a server over OpenAI's Chat Completions, greedily.

Owns the way from an example to messages and to what was said. Knows nothing of what is right.
"""

from __future__ import annotations

import base64
import io
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from PIL import Image

from mmserve.vision.train.example import Example, Turn

ANSWER_TOKENS = 64  # at most; whole captions take some forty
TIMEOUT_S = 600  # of one answer, on a machine that is busy


class ServerError(ValueError):
    """The server refused a question, or is gone."""


@dataclass(frozen=True)
class Api:
    """A server's address, the model that is asked, and the key where it needs one."""

    url: str
    model: str
    key: str

    def ask(self, messages: list[dict[str, Any]]) -> str:
        body = {
            "model": self.model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": ANSWER_TOKENS,
        }
        answer = request(f"{self.url}/v1/chat/completions", self.key, body)
        return str(answer["choices"][0]["message"]["content"] or "")


def connect(url: str, key: str) -> Api:
    """The server at `url`, with the first model it lists."""
    url = url.rstrip("/")
    return Api(url, str(request(f"{url}/v1/models", key)["data"][0]["id"]), key)


def request(url: str, key: str, body: dict[str, Any] | None = None) -> Any:
    """One JSON answer. Raises `ServerError` with what the server said."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    try:
        asked = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise ServerError(f"{url}: {error.code} {error.read().decode()[:300]}") from error
    except OSError as error:
        raise ServerError(f"{url}: {error}") from error


def messages(example: Example, detail: str) -> list[dict[str, Any]]:
    """All turns but the last one's answer; the answers before it are the right ones."""
    found: list[dict[str, Any]] = []
    for i, turn in enumerate(example.turns):
        found.append({"role": "user", "content": content(example, turn, detail)})
        if i < len(example.turns) - 1:
            found.append({"role": "assistant", "content": turn.answer})
    return found


def content(example: Example, turn: Turn, detail: str) -> list[dict[str, Any]]:
    shown = [
        {"type": "image_url", "image_url": {"url": data_url(example.images[i]), "detail": detail}}
        for i in turn.shows
    ]
    return [*shown, {"type": "text", "text": turn.question}]


def data_url(image: Image.Image) -> str:
    out = io.BytesIO()
    image.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()

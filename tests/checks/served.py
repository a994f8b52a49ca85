"""A server process of the real model for the checks, and what they ask it.

Owns starting `mmserve serve` on a free port, reading its metrics and drawing test pictures.
"""

from __future__ import annotations

import base64
import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI
from PIL import Image, ImageDraw
from prometheus_client.parser import text_string_to_metric_families

START_S = 300  # the first start fetches and converts the base model


@dataclass(frozen=True)
class Served:
    url: str
    pid: int | None = None  # None: somebody else's server
    admin: str = "none"  # the key for its metrics

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300)

    def model(self) -> str:
        return self.client().models.list().data[0].id

    def metric(self, name: str, **labels: str) -> float:
        """The value of `mmserve:name{labels}`, or its sum over replicas."""
        headers = {"authorization": f"Bearer {self.admin}"}
        text = httpx.get(f"{self.url}/metrics", headers=headers).text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        found = [
            sample.value
            for sample in samples
            if sample.name == f"mmserve:{name}"
            and {k: v for k, v in sample.labels.items() if k != "replica"} == labels
        ]
        assert found, f"no metric {name} {labels}"
        return float(sum(found))

    def memory(self) -> int:
        """Resident bytes of the server process."""
        assert self.pid is not None
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def wait_idle(self, seconds: float = 20) -> None:
        """Until nothing runs, waits or holds a page."""
        deadline = time.monotonic() + seconds
        while self.busy():
            assert time.monotonic() < deadline, f"still busy: {self.busy()}"
            time.sleep(0.1)

    def busy(self) -> dict[str, float]:
        figures = {
            "running": self.metric("num_requests_running"),
            "waiting": self.metric("num_requests_waiting"),
            "text": self.metric("pages", pool="text", state="active"),
            "vision": self.metric("pages", pool="vision", state="active"),
        }
        return {name: value for name, value in figures.items() if value}


@contextmanager
def serving(*flags: str, command: str = "serve") -> Iterator[Served]:
    """`mmserve serve`, or deploy, with these flags, ready; ended afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "mmserve", command, "--port", str(port)]
    words += ["--data-dir", "none", *flags]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while not _healthy(url):
            assert process.poll() is None, f"the server ended with {process.returncode}"
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.2)
        yield Served(url, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def picture(seed: int, word: str = "") -> bytes:
    """A PNG of a coloured shape, different for every seed."""
    colours = ["red", "green", "blue", "orange", "purple", "black", "teal", "brown"]
    image = Image.new("RGB", (96 + seed % 7, 96), "white")
    draw = ImageDraw.Draw(image)
    x, y, side = 10 + seed % 23, 10 + seed // 23 % 19, 30 + seed // 437 % 30
    box = (x, y, x + side, y + side)
    kind = seed % 3
    colour = colours[seed % len(colours)]
    if kind == 0:
        draw.ellipse(box, fill=colour)
    elif kind == 1:
        draw.rectangle(box, fill=colour)
    else:
        draw.polygon([(x, y + side), (x + side, y + side), (x + side // 2, y)], fill=colour)
    draw.point((0, 0), (seed % 256, seed // 256 % 256, 7))
    if word:
        draw.text((5, 75), word, fill="black")
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def image_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": _url(data)}}


def input_parts(*parts: bytes | str) -> Any:
    """Pictures and texts as Responses and Realtime have them."""
    return [
        {"type": "input_image", "image_url": _url(part)}
        if isinstance(part, bytes)
        else {"type": "input_text", "text": part}
        for part in parts
    ]


def user(*parts: bytes | str) -> dict[str, Any]:
    """A user message of pictures and texts."""
    content = [
        image_part(part) if isinstance(part, bytes) else {"type": "text", "text": part}
        for part in parts
    ]
    return {"role": "user", "content": content}


def ask(client: Any, model: str, messages: list[Any], **options: Any) -> Any:
    """One greedy chat completion."""
    options = {"temperature": 0, "max_tokens": 40} | options
    return client.chat.completions.create(model=model, messages=messages, **options)


@contextmanager
def given(url: str | None, *flags: str) -> Iterator[Served]:
    """The server at `url`, or a new one."""
    if url:
        yield Served(url)
        return
    with serving(*flags) as served:
        yield served

"""A real server on a free port, in a thread, over the fake engine."""

from __future__ import annotations

import base64
import http.client
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI

from mmserve.config import ServerConfig
from mmserve.server.runner import Server, make_server
from mmserve.server.services import Services

# Appended, so that nothing of the root can shadow an installed package.
sys.path.append(str(Path(__file__).parents[2]))

from tests.server.fake_engine import FakeEngine
from tests.server.witness import Witness

KEY, ADMIN_KEY = "sk-test_KEY-1", "sk-test_ADMIN-1"
PATIENCE_S = 30.0  # for what must happen; only what never happens takes so long


def eventually(condition: Callable[[], object]) -> bool:
    """True as soon as `condition` holds, False when it does not come to hold."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


@dataclass
class Running:
    """A server under test and clients for it."""

    engine: FakeEngine
    server: Server
    key: str | None
    _clients: list[Any] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.server.url()

    @property
    def ws_url(self) -> str:
        return self.url.replace("http", "ws", 1) + "/v1/responses"

    def http(self, **options: Any) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        headers |= options.pop("headers", {})
        client = httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE_S, **options)
        self._clients.append(client)
        return client

    def metrics(self) -> str:
        """What an operator reads."""
        answer = self.http(headers={"authorization": f"Bearer {ADMIN_KEY}"}).get("/metrics")
        assert answer.status_code == 200
        return answer.text

    def openai(self, **options: Any) -> OpenAI:
        client = OpenAI(
            base_url=f"{self.url}/v1", api_key=self.key or "none", max_retries=0, **options
        )
        self._clients.append(client)
        return client

    def async_openai(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key or "none", max_retries=0)

    @property
    def services(self) -> Services:
        services: Services = self.server.config.app.state.services  # type: ignore[union-attr]
        return services

    def idle(self) -> bool:
        """True once nothing runs and every response has its last status."""
        services = self.services
        return eventually(lambda: not (self.engine.running or services.jobs or services.background))

    def read_by(self, count: int) -> bool:
        """True once the server knows of so many readers of its running responses."""
        jobs = self.services.jobs
        return eventually(lambda: sum(job._num_readers for job in list(jobs)) == count)

    def hang_up(self, path: str, body: dict[str, Any]) -> None:
        """Post, and close the connection once the engine is at work."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=PATIENCE_S)
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        assert eventually(lambda: self.engine.running)
        connection.close()


def start(config: ServerConfig, engine: FakeEngine) -> tuple[Running, Callable[[], None]]:
    server = make_server(config, engine)
    server.config.log_level = "warning"
    witness = Witness(cast(Any, server.config.app))
    server.config.app = witness
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    eventually(lambda: server.started or not thread.is_alive())
    assert server.started
    key = config.api_keys[0] if config.api_keys else None
    running = Running(engine, server, key)

    def stop() -> None:
        for client in running._clients:
            client.close()
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert not witness.wrong, "answers that /openapi.json does not describe"

    return running, stop


@pytest.fixture
def launch() -> Iterator[Callable[..., Running]]:
    """Start servers with their own settings; all are stopped at the end."""
    stops: list[Callable[[], None]] = []

    def begin(engine: FakeEngine | None = None, **settings: Any) -> Running:
        config = ServerConfig(port=0, **settings)
        running, stop = start(config, engine or FakeEngine())
        stops.append(stop)
        return running

    yield begin
    for stop in stops:
        stop()


@pytest.fixture(scope="module")
def module_server() -> Iterator[Running]:
    config = ServerConfig(port=0, api_keys=(KEY,), admin_keys=(ADMIN_KEY,))
    running, stop = start(config, FakeEngine())
    yield running
    stop()


@pytest.fixture
def server(module_server: Running) -> Running:
    """One server a test module, its engine set back to its defaults."""
    engine = module_server.engine
    engine.hold_at, engine.script, engine.queue_full = None, None, False
    engine.num_prepared = 0
    engine.prompts.clear()
    engine.tenants.clear()
    engine.prefills.clear()
    engine.params.clear()
    engine.aborted.clear()
    return module_server


def png(tag: str = "red") -> bytes:
    """Bytes that the fake engine takes for an image."""
    return b"\x89PNG\r\n\x1a\n" + tag.encode()


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()

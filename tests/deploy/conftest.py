"""A router over servers in threads, each over the fake engine and all over one data folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from openai import OpenAI

from mmserve.config import ServerConfig
from mmserve.deploy.directory import Directory, Facts
from mmserve.deploy.proxy import Proxy
from tests.server.conftest import PATIENCE_S, Running, eventually, start
from tests.server.fake_engine import FakeEngine

FOREVER = time.time() + 1e6


@dataclass
class Routed:
    """`replicas`: running servers by name."""

    directory: Directory
    server: uvicorn.Server
    replicas: dict[str, Running]
    loads: dict[str, float] = field(default_factory=dict)
    draining: set[str] = field(default_factory=set)
    absent: set[str] = field(default_factory=set)

    def learn(self) -> None:
        self.directory.learn(
            Facts(name, each.url, name not in self.draining, self.loads.get(name, 0.0), FOREVER)
            for name, each in self.replicas.items()
            if name not in self.absent
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, **options)

    def openai(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def kill(self, name: str) -> None:
        """Its port is closed and its connections are cut; nobody has said so yet."""
        server = self.replicas[name].server
        for listening in server.servers:
            listening.get_loop().call_soon_threadsafe(listening.close)
        for connection in list(server.server_state.connections):
            transport: Any = connection.transport
            server.servers[0].get_loop().call_soon_threadsafe(transport.abort)

    def served(self) -> dict[str, int]:
        return {name: len(each.engine.prompts) for name, each in self.replicas.items()}


@pytest.fixture
def routed(tmp_path: Path) -> Iterator[Callable[..., Routed]]:
    stops: list[Callable[[], None]] = []

    def begin(*names: str, **settings: Any) -> Routed:
        replicas = {}
        for name in names or ("a", "b", "c"):
            config = ServerConfig(port=0, data_dir=tmp_path / "data", replica=name, **settings)
            replicas[name], stop = start(config, FakeEngine())
            stops.append(stop)
        directory = Directory()
        app = Proxy(directory)
        server = uvicorn.Server(
            uvicorn.Config(app, port=0, log_level="warning", loop="asyncio", lifespan="on")
        )
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        assert eventually(lambda: server.started)

        def stop_router() -> None:
            server.should_exit = True
            thread.join(PATIENCE_S)

        stops.append(stop_router)
        running = Routed(directory, server, replicas)
        running.learn()
        return running

    yield begin
    for stop in reversed(stops):
        stop()

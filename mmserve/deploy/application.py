"""The Ray Serve application: replicas, what they say of themselves, and the router before them.

Owns what Ray starts, restarts and replaces. A replica is a `mmserve serve` process under a Serve
replica, which dies with it; the router reaches it at an address of its own, and Serve's proxies
reach the router. Imported only where Ray is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.schema import LoggingConfig

from mmserve.deploy.directory import Directory, Facts
from mmserve.deploy.launch import Launch
from mmserve.deploy.process import ServerEndedError, ServerProcess
from mmserve.deploy.proxy import Proxy
from mmserve.deploy.scaling import QUEUE_S, VISION_USE, desired_replicas

NAME = "mmserve"
STALE_S = 5.0  # without a word a replica is taken to be gone
TELL_S = 1.0  # between two words of a replica, and two looks of a router
LAST_S = 20.0  # beyond the time in which a server drains
MANY = 100_000  # requests and sockets at once; replicas say when it is enough
NOTHING: dict[str, Any] = {"num_cpus": 0}
QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)  # servers log requests


class Reports:
    """What each replica has said last. Lost with its process, and whole again after `TELL_S`."""

    def __init__(self) -> None:
        self._facts: dict[str, Facts] = {}
        self._since = time.monotonic()

    async def tell(self, facts: Facts) -> None:
        self._facts[facts.name] = replace(facts, at=time.monotonic())

    async def forget(self, name: str) -> None:
        self._facts.pop(name, None)

    async def all(self) -> list[Facts] | None:
        """`at`: how long ago each was told, as clocks of machines differ. None until every replica
        has had the time to tell."""
        now = time.monotonic()
        if now < self._since + 3 * TELL_S:
            return None
        self._facts = {n: each for n, each in self._facts.items() if now - each.at < STALE_S}
        return [replace(each, at=now - each.at) for each in self._facts.values()]


class Replica:
    """One server; it is constructed once that takes requests."""

    async def __init__(self, reports: Any, launch: Launch) -> None:  # type: ignore[misc]
        self._reports, self._launch = reports, launch
        self._name: str = serve.get_replica_context().replica_id.unique_id
        host = "127.0.0.1" if launch.near else ray.util.get_node_ip_address()
        flags = launch.serve_flags(self._name, host)
        self._server = ServerProcess(flags, launch.admin_key)
        self._telling: asyncio.Task[None] | None = None
        await self._server.start()
        self._telling = asyncio.ensure_future(self._tell())

    async def _tell(self) -> None:
        while self._server.alive:
            await self._server.look()
            await self._say()
            await asyncio.sleep(TELL_S)
        await self._reports.forget.remote(self._name)

    async def _say(self) -> None:
        server = self._server
        load = server.now.running + server.now.waiting
        facts = Facts(self._name, server.url, server.ready, load, 0.0)
        with contextlib.suppress(Exception):  # whoever keeps reports is being started anew
            await asyncio.wait_for(self._reports.tell.remote(facts), STALE_S)

    async def check_health(self) -> None:
        if not self._server.alive:
            raise ServerEndedError("the server has ended")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {QUEUE_S: self._server.queue_s, VISION_USE: self._server.now.vision_use}

    async def __del__(self) -> None:
        # It goes on telling while it drains, and answers for what it keeps.
        self._server.ready = False
        await self._say()
        await self._server.stop(self._launch.drain_s)
        if self._telling is not None:
            self._telling.cancel()
        with contextlib.suppress(Exception):
            await self._reports.forget.remote(self._name)


class Router:
    """The ingress: `Proxy` over what `Reports` has; constructed once there is a replica to ask.
    `replicas` is named so that it belongs to the application."""

    async def __init__(self, reports: Any, replicas: Any) -> None:  # type: ignore[misc]
        self._reports = reports
        self._directory = Directory()
        self._looking = asyncio.ensure_future(self._look())
        while not self._directory.ready():
            await asyncio.sleep(TELL_S)

    def __serve_build_asgi_app__(self) -> Proxy:
        return Proxy(self._directory)

    async def _look(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # it is being started anew
                facts: list[Facts] | None = await self._reports.all.remote()
                now = time.time()
                if facts is not None:  # else those that were known are better than none
                    self._directory.learn(replace(each, at=now - each.at) for each in facts)
            await asyncio.sleep(TELL_S)


def _replicas(launch: Launch) -> Any:
    number: dict[str, Any] = {"num_replicas": launch.replicas}
    if launch.max_replicas is not None:
        policy = AutoscalingPolicy(policy_function=desired_replicas)
        number = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=launch.replicas, max_replicas=launch.max_replicas, policy=policy
            )
        }
    return serve.deployment(
        name="replicas",
        max_ongoing_requests=MANY,
        logging_config=QUIET,
        max_surge_percent=1,  # one more at a time: a new one is up before an old one drains
        health_check_period_s=1,
        graceful_shutdown_timeout_s=launch.drain_s + LAST_S,
        graceful_shutdown_wait_loop_s=TELL_S,
        ray_actor_options={"num_cpus": 0, "num_gpus": launch.gpus},
        **number,
    )(Replica)


def _one(name: str, cls: type, **options: Any) -> Any:
    return serve.deployment(
        name=name,
        max_ongoing_requests=MANY,
        logging_config=QUIET,
        ray_actor_options=NOTHING,
        **options,
    )(cls)


def application(launch: Launch) -> Any:
    """Deployments, bound. Ray replaces every one of them when it is run again."""
    reports = _one("reports", Reports).bind()
    replicas = _replicas(launch).bind(reports, launch)
    router = _one(
        "router",
        serve.ingress()(Router),
        max_surge_percent=100,
        graceful_shutdown_timeout_s=launch.drain_s + LAST_S,
    )
    return router.bind(reports, replicas)

"""`mmserve deploy`: several servers behind one address, started and kept running by Ray Serve.

Owns its flags and what it prints. Ray is imported once it runs.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mmserve import flags
from mmserve.config import ServerConfig
from mmserve.deploy.launch import Launch

LOOPBACK = ("127.0.0.1", "localhost", "::1")
OBJECTS = 80 * 2**20  # bytes of Ray's object store, which nothing of ours goes through
Border = Callable[[argparse.Namespace], ServerConfig]


class RayMissingError(ValueError):
    """It comes with an extra."""


def add_deploy_command(
    commands: Any, add_serve_flags: Callable[[argparse.ArgumentParser], None], border: Border
) -> None:
    """`border`: what the flags of `serve` say of the server's border."""
    deploy = commands.add_parser(
        "deploy", help="several servers behind one address (Ray Serve; docs/deploy.md)"
    )
    _add_own_flags(deploy)
    add_serve_flags(deploy)
    deploy.set_defaults(run=lambda args: _deploy(args, border(args)))


def _add_own_flags(parser: argparse.ArgumentParser) -> None:
    own = parser.add_argument_group("replicas (docs/deploy.md)")
    own.add_argument("--replicas", type=flags.count, default=2, help="servers (default: 2)")
    own.add_argument(
        "--max-replicas",
        type=flags.count,
        help="as many as load may call for; --replicas is the least then",
    )
    own.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="a Ray cluster that is there, or: auto (default: Ray is started on this machine and "
        "ends with the command)",
    )


def passed_on(words: Sequence[str]) -> tuple[str, ...]:
    """What of a deployment's flags is for its servers: not its own, nor TLS, which ends before
    them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_own_flags(parser)
    parser.add_argument("--ssl-certfile")
    parser.add_argument("--ssl-keyfile")
    return tuple(parser.parse_known_args(list(words))[1])


def launch_of(args: argparse.Namespace, border: ServerConfig, words: Sequence[str]) -> Launch:
    """`words`: the flags as they were written. Raises `ValueError` for what does not fit."""
    near = border.host in LOOPBACK
    keys = bool(border.api_keys) or border.api_key_file is not None
    if not keys and not near:
        raise ValueError(f"listening on {border.host} needs an API key (--api-key)")
    if args.max_replicas is not None and args.max_replicas < args.replicas:
        raise ValueError("--max-replicas is less than --replicas")
    return Launch(
        passed_on(words),
        args.replicas,
        args.max_replicas,
        near,
        0 if args.device == "cpu" else args.tensor_parallel_size,
        border.drain_s if args.drain_seconds is None else args.drain_seconds,
        secrets.token_hex(16) if keys else None,
    )


def _deploy(args: argparse.Namespace, border: ServerConfig) -> None:
    words = sys.argv[sys.argv.index("deploy") + 1 :]
    launch = launch_of(args, border, words)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody is told without being asked
    try:
        import ray
        from ray import serve
        from ray.serve.config import HTTPOptions

        from mmserve.deploy.application import NAME, QUIET, application
    except ImportError as error:
        raise RayMissingError(f"`pip install mmserve[ray]` is needed: {error}") from error
    own = {"include_dashboard": False, "object_store_memory": OBJECTS}
    ray.init(address=args.ray_address or "local", **({} if args.ray_address else own))
    if launch.near and len(ray.nodes()) > 1:
        raise ValueError("a cluster of several machines needs --host 0.0.0.0 and an API key")
    serve.start(
        proxy_location="HeadOnly" if launch.near else "EveryNode",
        logging_config=QUIET,
        http_options=HTTPOptions(
            host=border.host,
            port=border.port,
            ssl_certfile=border.ssl_certfile and str(border.ssl_certfile),
            ssl_keyfile=border.ssl_keyfile and str(border.ssl_keyfile),
        ),
    )
    launch = with_gpus_of(launch, ray.cluster_resources().get("GPU", 0))
    serve.run(application(launch), name=NAME, route_prefix="/")
    scheme = "https" if border.ssl_certfile else "http"
    print(f"mmserve is ready: {scheme}://{border.host}:{border.port}", flush=True)
    if args.ray_address is None:
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
        serve.shutdown()
    ray.shutdown()


def with_gpus_of(launch: Launch, gpus: float) -> Launch:
    """Replicas take GPUs only where there are any."""
    return launch if gpus else replace(launch, gpus=0)

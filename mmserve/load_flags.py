"""The flags of load and faults: what a server bounds, and when it gives up (docs/operations.md).

Owns their names, units and way into the configuration. Knows nothing of commands.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from mmserve import flags
from mmserve.config import Config, EngineConfig, ServerConfig


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load and faults (docs/operations.md)")
    server, engine = ServerConfig(), EngineConfig()
    load.add_argument(
        "--drain-seconds",
        type=flags.seconds,
        default=server.drain_s,
        help=f"that running answers get after SIGTERM (default: {server.drain_s:g})",
    )
    load.add_argument(
        "--max-request-seconds",
        type=flags.seconds,
        default=server.max_request_s,
        help="from a request to the end of its answer, 0 for any time (the default)",
    )
    load.add_argument(
        "--slow-reader-seconds",
        type=flags.seconds,
        default=server.slow_reader_s,
        help="in which a client takes nothing of its answer before it is let go "
        f"(default: {server.slow_reader_s:g})",
    )
    load.add_argument(
        "--max-sockets-per-key",
        type=flags.count,
        default=server.sockets_per_key,
        help=f"open WebSockets (default: {server.sockets_per_key})",
    )
    load.add_argument(
        "--host-memory-limit",
        type=flags.share,
        default=server.host_memory_limit,
        help="share of the host's memory in use above which new work is refused, 0 for any "
        f"(default: {server.host_memory_limit:g})",
    )
    load.add_argument(
        "--max-waiting",
        type=flags.count,
        default=engine.scheduler.max_waiting,
        help="requests that may wait for a seat before others are refused "
        f"(default: {engine.scheduler.max_waiting})",
    )
    for name, what in (("ttft", "to a first token"), ("itl", "between two tokens")):
        load.add_argument(
            f"--slo-{name}-ms",
            type=flags.milliseconds,
            default=0.0,
            metavar="MS",
            help=f"milliseconds {what} that steps are sized and load is shed for, 0 for none",
        )
    load.add_argument(
        "--watchdog-seconds",
        type=flags.seconds,
        default=engine.watchdog_s,
        help="without progress before the engine is started anew, 0 for never "
        f"(default: {engine.watchdog_s:g})",
    )


def with_load(args: argparse.Namespace, config: Config) -> Config:
    """The configuration as these flags have it."""
    server = replace(
        config.server,
        drain_s=args.drain_seconds,
        max_request_s=args.max_request_seconds,
        slow_reader_s=args.slow_reader_seconds,
        sockets_per_key=args.max_sockets_per_key,
        host_memory_limit=args.host_memory_limit,
    )
    scheduler = replace(
        config.engine.scheduler,
        max_waiting=args.max_waiting,
        slo_ttft_s=args.slo_ttft_ms / 1e3,
        slo_itl_s=args.slo_itl_ms / 1e3,
    )
    engine = replace(config.engine, scheduler=scheduler, watchdog_s=args.watchdog_seconds)
    return Config(engine, server)

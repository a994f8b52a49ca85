"""The command line: `mmserve serve`, `chat`, `bench`, `quality`, `eval`, `kv`, training and more.

Owns flags, the environment and their way into the configuration tree; nothing below reads either.
Flags use vLLM's words where it has one.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import shlex
import sys
from pathlib import Path

import platformdirs

from mmserve import __version__, flags
from mmserve.config import Config, DecodingConfig, ServerConfig
from mmserve.deploy.command import add_deploy_command
from mmserve.engine_flags import (
    add_engine_flags,
    add_image_flags,
    add_parallel_flags,
    add_stage_flags,
    add_tier_flags,
    engine_config,
    tier_config,
)
from mmserve.evaluation.command import add_eval_command
from mmserve.faults import Faults
from mmserve.kv_command import add_kv_commands
from mmserve.load_flags import add_load_flags, with_load
from mmserve.places import own_place
from mmserve.plan.command import add_plan_command
from mmserve.stages.command import add_stage_command, staged
from mmserve.train_command import add_train_command
from mmserve.vision_command import add_vision_command

EXIT_ENGINE_LOST = 75  # EX_TEMPFAIL: started anew, it may well work


def data_dir(args: argparse.Namespace) -> Path | None:
    """The folder that was named; None for the word `none`."""
    if args.data_dir is None:
        return platformdirs.user_data_path("mmserve", appauthor=False)
    if args.data_dir == "none" and args.database_url:
        raise ValueError("--database-url needs a data folder for the pictures")
    return None if args.data_dir == "none" else Path(args.data_dir)


def server_config(args: argparse.Namespace) -> ServerConfig:
    """The border, without what load flags say."""
    return ServerConfig(
        host=args.host,
        port=args.port,
        api_keys=(*(args.api_key or ()), *os.environ.get("MMSERVE_API_KEY", "").split()),
        api_key_file=args.api_key_file,
        admin_keys=(*(args.admin_key or ()), *os.environ.get("MMSERVE_ADMIN_KEY", "").split()),
        allow_origins=tuple(args.allow_origin or ()),
        allow_image_hosts=tuple(args.allow_image_host or ()),
        log_format=args.log_format,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
        data_dir=data_dir(args),
        database_url=args.database_url,
        replica=args.replica,
    )


def _serve(args: argparse.Namespace) -> None:
    from mmserve.engine.async_engine import AsyncEngine
    from mmserve.server.journal import CannotStoreError
    from mmserve.server.runner import EngineLostError, serve

    server = server_config(args)

    def run(server: ServerConfig, own: Path | None) -> None:
        tiers = tier_config(args, own)
        engine = engine_config(args)
        cache = dataclasses.replace(engine.cache, kv_compatible_with=tuple(args.kv_compatible_with))
        faults, decoding = Faults(os.environ.get("MMSERVE_FAULTS", "")), args.image_decode_processes
        engine = dataclasses.replace(
            engine, cache=cache, tiers=tiers, decoding=DecodingConfig(decoding), faults=faults
        )
        engine = dataclasses.replace(engine, tensor_parallel_size=args.tensor_parallel_size)
        config = with_load(args, Config(engine, dataclasses.replace(server, faults=faults)))
        with staged(config.engine, args.stages) as staged_engine:
            serve(config.server, AsyncEngine(staged_engine))

    try:
        if server.replica is None or server.data_dir is None:
            run(server, server.data_dir)
        else:
            with own_place(server.data_dir / "replicas") as own:
                run(server, own)
    except CannotStoreError as error:
        if args.data_dir or args.database_url or args.replica:
            raise
        print(f"mmserve keeps nothing over a restart: {error}", file=sys.stderr)
        run(dataclasses.replace(server, data_dir=None), None)
    except EngineLostError as error:
        print(f"mmserve: {error}", file=sys.stderr, flush=True)
        os._exit(EXIT_ENGINE_LOST)  # a device that hangs would hang the interpreter's end, too


def _chat(args: argparse.Namespace) -> None:
    from mmserve.chat import chat

    *files, question = args.words
    chat(engine_config(args), [Path(f) for f in files], question, args.max_tokens)


def _bench_engine(args: argparse.Namespace) -> None:
    from mmserve.bench.dims import SHAPES
    from mmserve.bench.engine_suite import EngineSuite, bench_engine

    suite = EngineSuite(
        shape=SHAPES.get(args.shape),
        peer=bool(args.peer),
        only=tuple(args.case or ()),
        budget_s=args.budget_seconds,
        step_tokens=args.step_tokens,
        json=args.json,
        command=shlex.join(["mmserve", *sys.argv[1:]]),
        seed=args.seed,
    )
    bench_engine(suite, engine_config(args).model)


def _bench_families(args: argparse.Namespace) -> None:
    from mmserve.bench.families import FamilySuite, bench_families
    from mmserve.bench.family_shapes import FAMILIES

    suite = FamilySuite(
        {name: FAMILIES[name] for name in args.family or FAMILIES},
        budget_s=args.budget_seconds,
        json=args.json,
        command=shlex.join(["mmserve", *sys.argv[1:]]),
        seed=args.seed,
    )
    bench_families(suite, engine_config(args).model)


def _bench_kernels(args: argparse.Namespace) -> None:
    from mmserve.bench.kernels import KernelSuite, bench_kernels  # Triton is there on Linux only

    bench_kernels(
        KernelSuite(
            device=args.device,
            budget_s=args.budget_seconds,
            json=args.json,
            command=shlex.join(["mmserve", *sys.argv[1:]]),
            seed=args.seed,
        )
    )


def _bench_restore(args: argparse.Namespace) -> None:
    from mmserve.bench.dims import SHAPES
    from mmserve.bench.restore import RestoreSuite, bench_restore

    suite = RestoreSuite(
        shape=SHAPES.get(args.shape),
        tokens=args.tokens,
        step_tokens=args.step_tokens,
        json=args.json,
        command=shlex.join(["mmserve", *sys.argv[1:]]),
        seed=args.seed,
    )
    bench_restore(suite, engine_config(args).model)


def _bench_drafts(args: argparse.Namespace) -> None:
    from mmserve.bench.drafts import DraftSuite, bench_drafts

    suite = DraftSuite(
        only=tuple(args.case or ()),
        json=args.json,
        command=shlex.join(["mmserve", *sys.argv[1:]]),
    )
    bench_drafts(suite, engine_config(args))


SUITES = {
    "drafts": _bench_drafts,
    "engine": _bench_engine,
    "families": _bench_families,
    "kernels": _bench_kernels,
    "restore": _bench_restore,
}


def _bench(args: argparse.Namespace) -> None:
    if args.workload in SUITES:
        return SUITES[args.workload](args)
    from mmserve.bench.command import Options, bench
    from mmserve.bench.workload import WORKLOADS

    default = WORKLOADS[args.workload].default
    given = {f: getattr(args, f) for f in vars(default) if getattr(args, f) is not None}
    options = Options(
        args.workload,
        dataclasses.replace(default, **given),
        seed=args.seed,
        peer_dtypes=tuple(args.peer_dtype or ("float32",)) if args.peer else (),
        json=args.json,
        command=shlex.join(["mmserve", *sys.argv[1:]]),
    )
    bench(options, engine_config(args))


def _quality(args: argparse.Namespace) -> None:
    from mmserve.bench.dims import DEFAULT, SHAPES
    from mmserve.bench.quality import PAIRS, SHAPE_PAIRS, Options, quality

    shape = None if args.shape == DEFAULT else SHAPES[args.shape]
    options = Options(
        pairs=tuple(args.formats or (PAIRS if shape is None else SHAPE_PAIRS)),
        shape=shape,
        tokens=args.output_tokens,
        questions=args.questions,
        json=args.json,
        plot=args.plot,
        command=shlex.join(["mmserve", *sys.argv[1:]]),
    )
    quality(options, engine_config(args))


def _models(args: argparse.Namespace) -> None:
    from mmserve.model.supported import listing

    print(listing())


def _add_border_flags(serve: argparse.ArgumentParser) -> None:
    """Where it listens and to whom, what it keeps, and what it tells of itself."""
    border = ServerConfig()
    serve.add_argument("--host", default=border.host)
    serve.add_argument("--port", type=flags.port, default=border.port)
    serve.add_argument("--api-key", action="append", help="may be given several times")
    serve.add_argument(
        "--api-key-file",
        type=flags.file,
        help="keys, one a line, with names and limits (docs/tenants.md); read again when changed",
    )
    serve.add_argument(
        "--admin-key", action="append", help="for `mmserve kv` and the KV view; several times"
    )
    serve.add_argument("--allow-origin", action="append", metavar="ORIGIN")
    serve.add_argument("--log-format", choices=("text", "json"), default=border.log_format)
    serve.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send traces to a collector, such as http://127.0.0.1:4318/v1/traces; needs "
        "mmserve[otel]",
    )
    serve.add_argument("--ssl-certfile", type=flags.file)
    serve.add_argument("--ssl-keyfile", type=flags.file)
    serve.add_argument(
        "--data-dir",
        default=os.environ.get("MMSERVE_DATA_DIR") or None,
        help="where conversations and files outlive the server, or: none (default: "
        "$MMSERVE_DATA_DIR, or the platform's folder for data)",
    )
    serve.add_argument(
        "--database-url",
        default=os.environ.get("MMSERVE_DATABASE_URL") or None,
        help="SQLAlchemy's (default: $MMSERVE_DATABASE_URL, or SQLite in the data folder)",
    )
    serve.add_argument(
        "--replica",
        type=flags.replica,
        metavar="NAME",
        help="of this server among those that share its data folder and database; `mmserve deploy` "
        "gives it",
    )


def _add_serve_flags(serve: argparse.ArgumentParser) -> None:
    _add_border_flags(serve)
    add_engine_flags(serve)
    add_image_flags(serve)
    add_tier_flags(serve)
    add_parallel_flags(serve)
    add_stage_flags(serve)
    add_load_flags(serve)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mmserve", description=__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")

    serve = commands.add_parser("serve", help="the HTTP and WebSocket server with the chat page")
    _add_serve_flags(serve)
    serve.set_defaults(run=_serve)
    add_deploy_command(commands, _add_serve_flags, server_config)

    chat = commands.add_parser("chat", help="one answer about some pictures, without a server")
    chat.add_argument(
        "words", nargs="+", metavar="FILE… QUESTION", help="pictures, then a question"
    )
    chat.add_argument("--max-tokens", type=flags.count, default=200)
    add_engine_flags(chat)
    chat.set_defaults(run=_chat)

    from mmserve.bench.flags import add_bench_flags, add_quality_flags

    bench = commands.add_parser("bench", help="measure latency, throughput and hit rates")
    add_bench_flags(bench, SUITES)
    add_engine_flags(bench)
    bench.set_defaults(run=_bench)

    compare = commands.add_parser("quality", help="what formats of KV cost in quality, and save")
    add_quality_flags(compare)
    add_engine_flags(compare)
    compare.set_defaults(run=_quality)

    models = commands.add_parser("models", help="what can be served, and how each was tested")
    models.set_defaults(run=_models)

    add_kv_commands(commands)
    add_train_command(commands, add_engine_flags, engine_config)
    add_vision_command(commands)
    add_eval_command(commands)
    add_plan_command(commands)
    add_stage_command(commands)
    return parser


def _share_cores() -> None:
    """Let PyTorch's worker threads wait briefly before they sleep; set before it is imported.

    By default GNU OpenMP spins for milliseconds. Beside any other busy process on the same cores
    that turned a product of 45 us into one of 8 ms; this spin costs 17 us when alone and 130 us
    in company.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def main(argv: list[str] | None = None) -> None:
    _share_cores()
    from mmserve.model.fetch import ModelUnavailableError

    args = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        args.run(args)
    except (ModelUnavailableError, ValueError) as error:  # as argparse does for a wrong flag
        print(f"mmserve: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # said in one sentence
        sys.exit(f"mmserve: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

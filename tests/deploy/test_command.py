"""`mmserve deploy`: whose flags are whose, and what does not fit."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from mmserve.__main__ import build_parser, main, server_config
from mmserve.deploy.command import launch_of, passed_on
from mmserve.deploy.launch import Launch


def launch(*flags: str) -> Launch:
    args = build_parser().parse_args(["deploy", *flags])
    return launch_of(args, server_config(args), flags)


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MMSERVE_API_KEY", raising=False)


def test_a_servers_flags_are_passed_on_and_the_deployments_own_are_not() -> None:
    own = ("--replicas", "3", "--max-replicas=5", "--ray-address", "auto")
    tls = ("--ssl-certfile", "a.pem", "--ssl-keyfile", "b.pem")
    servers = ("--model", "x", "--max-num-seqs=8", "--allow-origin", "https://a")
    assert passed_on([*own, *servers, *tls]) == servers


def test_a_replica_takes_all_that_it_is_given() -> None:
    flags = launch("--model", "x", "--port", "9000", "--drain-seconds", "3").serve_flags(
        "a1", "::1"
    )
    args = build_parser().parse_args(["serve", *flags])
    assert (args.model, args.port, args.host, args.replica) == ("x", 0, "::1", "a1")


def test_a_replica_has_as_many_gpus_as_compute_its_model_together() -> None:
    assert launch("--tensor-parallel-size", "2").gpus == 2
    assert launch("--device", "cpu").gpus == 0


def test_who_is_reached_from_elsewhere_asks_for_a_key() -> None:
    with pytest.raises(ValueError, match="API key"):
        launch("--host", "0.0.0.0")
    far = launch("--host", "0.0.0.0", "--api-key", "k")
    assert not far.near and far.admin_key
    assert launch().near and launch().admin_key is None


def test_the_most_replicas_are_not_fewer_than_the_least() -> None:
    with pytest.raises(ValueError, match="less than"):
        launch("--replicas", "3", "--max-replicas", "2")


def test_without_ray_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(sys, "argv", ["mmserve", "deploy"])
    with pytest.raises(SystemExit) as ended:
        main(["deploy"])
    assert ended.value.code == 2 and "mmserve[ray]" in capsys.readouterr().err


def test_ray_is_known_to_what_runs_on_it_alone() -> None:
    package = Path(__file__).parents[2] / "mmserve"
    for path in package.rglob("*.py"):
        if path.name in ("application.py", "serve_app.py"):
            continue
        top = ast.parse(path.read_text("utf-8")).body
        for node in (n for n in top if isinstance(n, (ast.Import, ast.ImportFrom))):
            names = [getattr(node, "module", None) or "", *(a.name for a in node.names)]
            assert not any(n == "ray" or n.startswith("ray.") for n in names), path


def test_a_supervised_server_ends_with_its_supervisor() -> None:
    script = "import mmserve.deploy.supervised as s, time; s.leash(); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(30) == -15

"""`mmserve kv export` and `import` against a server, and what they say where one refuses."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mmserve.kv_command import add_kv_commands
from tests.server import conftest
from tests.server.conftest import Running

ADMIN = "admin-key"
launch = conftest.launch


@pytest.fixture
def server(launch: Callable[..., Running]) -> Iterator[Running]:
    yield launch(admin_keys=(ADMIN,))


def run(*words: str) -> None:
    parser = argparse.ArgumentParser()
    add_kv_commands(parser.add_subparsers())
    args = parser.parse_args(["kv", *words])
    args.run(args)


def at(server: Running, key: str = ADMIN) -> tuple[str, ...]:
    return ("--url", server.url, "--admin-key", key)


def test_a_file_goes_out_and_in(
    server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.kv"
    run("export", str(file), *at(server))
    assert file.read_bytes() == b"all KV"
    run("import", str(file), *at(server))
    assert "text   1 tokens new, 0 known, 0 left out" in capsys.readouterr().out


@pytest.mark.parametrize("act", ["export", "import"])
def test_a_refusal_is_one_sentence_and_leaves_the_file(
    server: Running, tmp_path: Path, act: str
) -> None:
    file = tmp_path / "a.kv"
    file.write_bytes(b"mine")
    with pytest.raises(SystemExit, match="The API key is not valid"):
        run(act, str(file), *at(server, "wrong"))
    assert file.read_bytes() == b"mine"
    assert list(tmp_path.iterdir()) == [file]


def test_a_bad_file_is_refused_with_the_servers_reason(server: Running, tmp_path: Path) -> None:
    file = tmp_path / "a.kv"
    file.write_bytes(b"mine")
    with pytest.raises(SystemExit, match="KV file is refused"):
        run("import", str(file), *at(server))


def test_no_server_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="does not answer"):
        run("export", str(tmp_path / "a.kv"), "--url", "http://127.0.0.1:9")


def test_an_address_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--url must be"):
        run("export", str(tmp_path / "a.kv"), "--url", "ftp://somewhere")

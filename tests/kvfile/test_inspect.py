"""`mmserve kv inspect`: a table of a good file, one sentence about a bad one."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmserve.__main__ import main
from mmserve.kvfile.file import write_file
from tests.kvfile.files import kv_file


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "a.kv"
    write_file(path, kv_file())
    return path


def test_a_table_names_model_geometry_prefixes_and_images(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["kv", "inspect", str(written)])
    out = capsys.readouterr().out
    assert "llama, weights float32" in out and "aa" * 32 in out
    assert "group 1      1 layers, 1 KV heads of 6, reading text and images, a window of 5" in out
    assert "text: 3 runs, 16 tokens" in out and "images: 2, 10 tokens" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["1", "0", "4", "12", "0", "0.00"] in rows  # of a prefix of 12 tokens
    assert ["01" * 32, "6", "0.00"] in rows


def test_a_damaged_file_is_said_in_one_sentence(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = written.read_bytes()
    written.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(SystemExit) as end:
        main(["kv", "inspect", str(written)])
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == ""
    assert said.err.count("\n") == 1 and "is damaged: its checksum is another" in said.err


def test_a_file_that_is_not_there_is_said_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["kv", "inspect", str(tmp_path / "none.kv")])
    assert end.value.code == 2 and "there is no file" in capsys.readouterr().err

"""`mmserve train` on the command line: what it lacks is said in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmserve.__main__ import main

STAGE = Path(__file__).parents[1] / "configs" / "train" / "see-1.json"


@pytest.mark.parametrize("words", [[], [str(STAGE)], ["--out", "there"], ["--fetch", str(STAGE)]])
def test_a_training_without_a_stage_or_a_place_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", *words])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "mmserve: train needs a stage and --out, or --fetch\n"


def test_a_training_without_its_archive_is_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "none.zip"
    with pytest.raises(SystemExit) as caught:
        main(["train", str(STAGE), "--out", str(tmp_path / "out"), "--assets", str(missing)])
    assert caught.value.code == 2
    assert f"{missing} is missing" in capsys.readouterr().err


def test_a_stage_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "stage.json"
    wrong.write_text("{}")
    with pytest.raises(SystemExit) as caught:
        main(["train", str(wrong), "--out", str(tmp_path / "out")])
    assert caught.value.code == 2
    assert "is no stage of training" in capsys.readouterr().err

"""`mmserve plan` from its flags to what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmserve.__main__ import main


def test_a_plan_is_a_table_and_the_same_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    words = ["--model", "idefics2-8b", "--images", "2", "--requests-per-s", "3"]
    main(["plan", *words, "--replicas", "3", "--simulate", "2000", "--json", str(path)])
    shown, plan = capsys.readouterr().out, json.loads(path.read_text())
    assert "idefics2-8b on 3 x h200" in shown and "a replica lost" in shown
    assert f"{plan['pools']['images']:,} images" in shown
    assert plan["traffic"]["images"] == 2 and plan["balance"]["requests_per_s"] == 1.0
    policies = [outcome["policy"] for outcome in plan["routing"]]
    assert policies == ["image-aware", "round robin", "least loaded"]


def test_a_text_model_has_no_images_and_one_replica_no_routing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["plan", "--model", "mistral-7b", "--requests-per-s", "100"])
    shown = capsys.readouterr().out
    assert "0 images" in shown and "routing" not in shown
    assert "OVERLOADED" in shown


def test_a_cpu_is_told_by_its_rates(capsys: pytest.CaptureFixture[str]) -> None:
    rates = ["--copy-rate", "25", "--matrix-rate", "0.3", "--memory", "8G"]
    main(["plan", "--hardware", "cpu", *rates, "--sessions", "4"])
    assert "smolvision-135m on 1 x cpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "mistral-7b", "--images", "1"], "say --images 0"),
        (["--hardware", "h900"], "none of h200"),
        (["--replicas", "1001"], "at most 1,000 replicas"),
        (["--sessions", "3", "--requests-per-s", "3"], "one of them"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["plan", *words])
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err

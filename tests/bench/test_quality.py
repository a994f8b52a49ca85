"""What `mmserve quality` compares, on the tiny model."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmserve import flags
from mmserve.bench import quality, quality_session
from mmserve.bench.load import Window
from mmserve.bench.quality import SHAPE_PAIRS, Options, QualityReport
from mmserve.bench.quality_session import Session, Steps, divergence, likelihood
from mmserve.config import EngineConfig
from tests.bench.tiny import SHAPE
from tests.engine.tiny import build_tiny, tiny_config, tiny_model


def best(weights: list[float]) -> dict[int, float]:
    total = sum(weights)
    return {token: math.log(w / total) for token, w in enumerate(weights)}


@given(
    st.lists(st.floats(0.01, 1), min_size=4, max_size=4),
    st.lists(st.floats(0.01, 1), min_size=4, max_size=4),
    st.integers(1, 4),
)
def test_a_divergence_is_zero_of_equals_and_never_below(
    own: list[float], other: list[float], known: int
) -> None:
    mine, theirs = best(own), best(other)
    assert divergence(mine, mine) == pytest.approx(0, abs=1e-9)
    whole = sum(math.exp(mine[t]) * (mine[t] - theirs[t]) for t in mine)
    part = divergence({t: mine[t] for t in range(known)}, theirs)
    assert -1e-9 <= part <= whole + 1e-6, "what is seen of it cannot be more than all of it"


def test_a_token_that_is_not_among_the_best_counts_as_the_least_of_them() -> None:
    assert likelihood({1: -0.5, 2: -3.0}, 1) == -0.5
    assert likelihood({1: -0.5, 2: -3.0}, 9) == -3.0


def compared(monkeypatch: pytest.MonkeyPatch, options: Options) -> QualityReport:
    monkeypatch.setattr(quality, "load", lambda model: tiny_model(max_model_len=2048))
    config: EngineConfig = tiny_config(dtype="int8")
    return quality.quality(options, config)


def test_pairs_are_compared_with_the_first_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = (("auto", "auto"), ("auto", "auto"), ("int8", "int2"), ("int4", "auto"))
    report = compared(
        monkeypatch,
        Options(pairs, tokens=3, questions=0, json=tmp_path / "q.json", plot=tmp_path / "q.png"),
    )
    first, same, coarse, by_page = report.rows
    assert first.same == same.same == 1.0
    assert set(first.nats) == {"text", "image", "turns"}
    assert all(value == 0 for row in (first, same) for value in row.nats.values())
    assert coarse.nats["image"] > 0
    assert coarse.text_tokens_per_gib > 3.5 * first.text_tokens_per_gib, "float32 here"
    assert by_page.nats["text"] > 0 and by_page.residual_bytes > coarse.residual_bytes == 0
    assert first.tokens_per_s > 0 and first.right is None
    assert json.loads((tmp_path / "q.json").read_text())["rows"][2]["vision"] == "int2"
    with Image.open(tmp_path / "q.png") as drawn:
        assert drawn.format == "PNG"
    assert "int8 / int2" in capsys.readouterr().out


def test_a_shape_shows_capacity_divergence_and_whole_steps_without_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = Steps(batch=3, context=40, images=2, window=Window(0.05, 4, 2, 1))
    options = Options(
        SHAPE_PAIRS,
        shape=dataclasses.replace(SHAPE, max_model_len=2048),
        steps=steps,
        tokens=2,
        json=tmp_path / "q.json",
    )
    report = quality.quality(options, EngineConfig())
    assert [(row.text, row.vision) for row in report.rows] == list(SHAPE_PAIRS)
    assert all(row.step_ms is not None and row.step_ms > 0 for row in report.rows)
    assert all(row.right is None for row in report.rows)
    assert report.rows[-1].images_per_gib > report.rows[0].images_per_gib
    assert json.loads((tmp_path / "q.json").read_text())["steps"]["batch"] == 3
    assert "3 sequences, 40 text tokens behind 2 images" in capsys.readouterr().out


def test_answers_come_in_the_order_of_their_questions_and_are_those_of_each_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quality_session, "AT_ONCE", 3)
    session = Session(build_tiny(tiny_config(dtype="int8")), tokens=4)
    prompts = session.prompts()["text"]
    alone = [session.answers([prompt])[0] for prompt in prompts]
    assert [said.tokens for said in session.answers(prompts)] == [said.tokens for said in alone]


def test_an_answer_that_another_one_gave_is_read_place_by_place() -> None:
    session = Session(build_tiny(tiny_config(dtype="int8")), tokens=5)
    prompt = session.prompts()["image"][0]
    (said,) = session.answers([prompt])
    assert len(said.tokens) == 5
    for own, found in zip(said.best, session.behind(prompt, said.tokens), strict=True):
        assert found == pytest.approx(own, abs=1e-5)


@pytest.mark.parametrize("text", ["int8", "int8:int3", "int3:int8", ""])
def test_formats_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        flags.formats(text)


def test_flags_of_a_comparison() -> None:
    assert flags.formats("auto:auto, int8:int2") == [("auto", "auto"), ("int8", "int2")]
    found: list[Any] = [flags.questions(text) for text in ("all", "0", "12")]
    assert found == [None, 0, 12]

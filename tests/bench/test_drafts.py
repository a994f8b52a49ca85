"""The suite of drafts at toy size on the CPU: both sides answer, and what is printed is of both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mmserve.bench.drafts import DraftSuite, bench_drafts
from mmserve.config import EngineConfig, ModelConfig, SpecConfig
from tests.bench.tiny import PROBE
from tests.model import families


def test_the_same_is_asked_with_drafts_and_without(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    suite = DraftSuite(streams=(1, 9), output_tokens=6, repeats=2, json=path, probe=PROBE)
    model = ModelConfig(str(families.build("llava", tmp_path)), device="cpu", dtype="float32")
    config = EngineConfig(model, speculative=SpecConfig("ngram", adaptive=False))
    report = bench_drafts(suite, config)
    assert [line.case for line in report.lines] == [
        "new questions, 1 streams",
        "the same again, 1 streams",
        "new pictures, 1 streams",
        "the same pictures again, 1 streams",
        "new drawings, 1 streams",
        "the same drawings again, 1 streams",
        "a document repeated, 1 streams",
        "questions, 9 streams",
    ]
    for line in report.lines:
        assert line.value and line.fault is None
        assert line.figures["% of tokens equal"] == 100
        assert line.figures["without"] > 0
        least, most = line.figures["x at least"], line.figures["x at most"]
        assert 0 < least <= line.figures["x as fast"] <= most
    assert sum(line.figures["drafted"] for line in report.lines) > 0
    assert len(json.loads(path.read_text())["lines"]) == 8
    chosen = bench_drafts(replace(suite, streams=(1,), only=("again",)), config)
    assert [line.case for line in chosen.lines] == [line.case for line in report.lines[:6]]
    with pytest.raises(ValueError, match="nothing drafts for"):
        bench_drafts(suite, replace(config, speculative=SpecConfig()))

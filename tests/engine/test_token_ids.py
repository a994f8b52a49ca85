"""Token ids that a prompt may hold and an answer cannot, and counts that outlive a new start."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmserve.config import CacheConfig, EngineConfig, ModelConfig
from mmserve.engine.engine import Engine
from mmserve.engine.sampling_limits import validate
from mmserve.errors import RequestError
from mmserve.model.weights import load
from mmserve.request import SamplingParams, TextSegment
from tests.engine.driver import Driver
from tests.model import families
from tests.model.border import message


def driver(folder: Path, **model: object) -> Driver:
    config = ModelConfig(model=str(folder), device="cpu", **model)  # type: ignore[arg-type]
    cache = CacheConfig(text_bytes=1 << 22, vision_bytes=1 << 22)
    return Driver(Engine(EngineConfig(config, cache), load(config)))


def test_penalties_pass_over_placeholders_beyond_the_logits(tmp_path: Path) -> None:
    """Llama 3.2 Vision's image token has an embedding, and no logit."""
    d = driver(families.build("mllama", tmp_path))
    said = message("user", "What is ", families.picture(1), " this?")
    images = [d.engine.pipeline.prepare(p.data) for p in said.parts if hasattr(p, "data")]
    segments = d.engine.template.render([said], images).segments
    held = [t for s in segments if isinstance(s, TextSegment) for t in s.token_ids]
    assert max(held) >= d.engine.vocab_size
    params = SamplingParams(max_tokens=6, temperature=0.0, repetition_penalty=1.2)
    assert len(d.ask(*segments, params=params)) == 6
    with pytest.raises(RequestError, match="logit_bias"):
        validate(SamplingParams(logit_bias={d.engine.vocab_size: 1.0}), d.engine.vocab_size)


def test_penalties_go_on_when_a_sequence_outgrows_the_trained_length(tmp_path: Path) -> None:
    """It is computed anew under other angles; what it has said stays said."""
    folder = families.build("llama_gqa", tmp_path)
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    d = driver(folder, rope_scaling=scaling)
    prompt = TextSegment(tuple(range(20, 40)))
    params = SamplingParams(max_tokens=60, temperature=0.0, frequency_penalty=2.0)
    request = d.submit((prompt,), params)
    while d.engine.has_work:
        live = d.engine._live.get(request)
        d.step()
    assert live is not None
    tokens = d.tokens(request)
    assert live.seq.course.regime == 1 and len(tokens) == 60
    counts = live.sampling._counts
    assert counts is not None and int(counts.sum()) == 59  # all but the last

"""The default model in the engine: transformers' tokens, the dense forward's logits, one answer
whatever is cached or runs beside it, and 8-bit weights that see as float32 sees."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from PIL import Image, ImageDraw

from mmserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mmserve.engine.engine import Engine
from mmserve.model.loader import LoadedModel, load_model
from mmserve.prompt import ImagePart, Message, Part, TextPart
from mmserve.request import BeamParams, SamplingParams, Segment, TextSegment
from tests.engine.driver import Driver
from tests.model.dense import dense_logits, embed

pytestmark = pytest.mark.model

MIB = 2**20
COLOURS = {"red": "#dd2222", "green": "#22aa22", "blue": "#2233dd", "yellow": "#eecc22"}
SHAPES = ("circle", "rectangle", "triangle")
PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three fruits.",
    "What is 12 + 7?",
    "Translate 'good morning' to Spanish.",
    "Who wrote Romeo and Juliet?",
    "Say hello in the style of a pirate.",
    "Explain gravity to a child. 万有引力 \N{GRINNING FACE}",
)
DTYPES = ["float32", "int8"]


class Chat(Driver):
    """A driver that is spoken to in words."""

    def segments(self, *parts: str | bytes) -> tuple[Segment, ...]:
        """One user turn; bytes are image files."""
        content: list[Part] = []
        images = []
        for part in parts:
            if isinstance(part, bytes):
                content.append(ImagePart(part))
                images.append(self.image(part).image)
            else:
                content.append(TextPart(part))
        message = Message("user", tuple(content))
        return self.engine.template.render([message], images).segments

    def say(self, *parts: str | bytes, count: int = 12) -> list[int]:
        return self.ask(*self.segments(*parts), params=greedy(count))

    def answer(self, *parts: str | bytes) -> str:
        return self.engine.tokenizer.decode(self.say(*parts)).strip().lower().rstrip(".")

    def forget(self) -> None:
        """As cold as a new engine."""
        self.engine.runner.vision[0].index.clear()
        assert self.engine.scheduler.radix is not None
        self.engine.scheduler.radix.clear()


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0)


def chat(dtype: str, *, lora: bool = True) -> Chat:
    model = ModelConfig(dtype=dtype, device="cpu", lora=lora)
    config = EngineConfig(
        model=model,
        cache=CacheConfig(text_bytes=160 * MIB, vision_bytes=64 * MIB),
        scheduler=SchedulerConfig(max_num_batched_tokens=150),
    )
    return Chat(Engine(config, load_model(model)))


@pytest.fixture(scope="module")
def chats() -> Any:
    """Each kind of engine, loaded when first asked for."""
    made: dict[str, Chat] = {}

    def get(dtype: str) -> Chat:
        if dtype not in made:
            made[dtype] = chat(dtype)
        made[dtype].forget()
        return made[dtype]

    return get


@pytest.fixture(scope="module")
def dense() -> LoadedModel:
    return load_model(ModelConfig(device="cpu"))


def drawing(shape: str, colour: str, size: int = 112, at: int = 0) -> bytes:
    image = Image.new("RGB", (224, 224), "white")
    draw = ImageDraw.Draw(image)
    low = (224 - size) // 2 + at
    high = low + size
    match shape:
        case "circle":
            draw.ellipse((low, low, high, high), COLOURS[colour])
        case "rectangle":
            draw.rectangle((low, low, high, low + size // 2), COLOURS[colour])
        case _:
            draw.polygon([((low + high) // 2, low), (low, high), (high, high)], COLOURS[colour])
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def test_without_the_adapter_text_is_transformers_text_token_for_token() -> None:
    base = cast(Any, load_model(ModelConfig(device="cpu", lora=False)).lm)
    ours = chat("float32", lora=False)
    requests = {p: ours.submit(ours.segments(p), greedy(20)) for p in PROMPTS}
    ours.run()
    for prompt, request in requests.items():
        (segment,) = ours.segments(prompt)
        assert isinstance(segment, TextSegment)
        ids = torch.tensor([segment.token_ids])
        with torch.no_grad():
            whole = base.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=20,
                do_sample=False,
                pad_token_id=base.config.eos_token_id,
            )
        assert ours.tokens(request) == whole[0, ids.shape[1] :].tolist(), prompt


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_the_adapter_text_stays_sensible(chats: Any, dtype: str) -> None:
    said = chats(dtype).answer("What is the capital of France?")
    assert "paris" in said


def test_paged_equals_dense_with_real_weights_and_images(chats: Any, dense: LoadedModel) -> None:
    d = chats("float32")
    red, blue = drawing("circle", "red"), drawing("triangle", "blue", at=20)
    asked = (
        d.segments(red, blue, "What is in the second picture?"),
        d.segments("Compare these.", blue, "and", red, "Which is round?"),
        d.segments("Name a colour."),
    )
    requests = [d.submit(segments, greedy(8)) for segments in asked]
    d.run()
    for segments, request in zip(asked, requests, strict=True):
        tokens = d.tokens(request)
        whole = (*segments, TextSegment(tuple(tokens[:-1])))
        expected = dense_logits(dense, *embed(dense, whole))[-len(tokens) :]
        assert tokens == expected.argmax(-1).tolist()
        assert float((torch.stack(d.logits[request]) - expected).abs().max()) <= 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_known_image_gives_the_cold_answer_in_any_place_and_computes_nothing(
    chats: Any, dtype: str
) -> None:
    a, b = drawing("circle", "green"), drawing("rectangle", "yellow", 60, -30)
    turns: list[tuple[str | bytes, ...]] = [
        (a, "What shape is this?"),
        ("Here is a picture I took on holiday last year, by the sea.", a, "What colour is it?"),
        (b, a, "What shape is in the second image?"),
        (a, b, a, "How many images are there?"),
    ]
    d, cold = chats(dtype), []
    for turn in turns:
        d.forget()
        cold.append(d.say(*turn))
    d.forget()
    d.say(b, "Anything?")
    d.say("First words.", a, "Anything?")
    before = d.counts()
    assert [d.say(*turn) for turn in turns] == cold
    assert d.counts() == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_sixteen_conversations_at_once_get_the_answers_they_get_alone(
    chats: Any, dtype: str
) -> None:
    pairs = [(shape, colour) for shape in SHAPES for colour in COLOURS]
    pairs = [*pairs, *pairs[:4]]
    turns: list[tuple[str | bytes, ...]] = [
        (drawing(shape, colour, 80 + 4 * n), "What is in this picture?")
        for n, (shape, colour) in enumerate(pairs)
    ]
    d = chats(dtype)
    requests = [d.submit(d.segments(*turn), greedy(8)) for turn in turns]
    d.run()
    together = [d.tokens(request) for request in requests]
    assert len({tuple(tokens) for tokens in together}) >= 6, "the answers must differ"
    for turn, tokens in zip(turns, together, strict=True):
        d.forget()
        assert d.say(*turn, count=8) == tokens
    d.assert_idle()


@pytest.mark.parametrize("question", ["What shape is in the image?", "What color is the shape?"])
def test_8_bit_weights_see_what_float32_sees(chats: Any, question: str) -> None:
    pairs = [(shape, colour) for shape in SHAPES for colour in COLOURS]
    answers = {
        dtype: [chats(dtype).answer(drawing(*pair), question) for pair in pairs]
        for dtype in ("float32", "int8")
    }
    assert answers["int8"] == answers["float32"]
    right = [pair[0] if "shape is in" in question else pair[1] for pair in pairs]
    seen = sum(word in said for word, said in zip(right, answers["int8"], strict=True))
    assert seen >= len(pairs) - 2, list(zip(pairs, answers["int8"], strict=True))


def test_beams_of_text_are_transformers_beams() -> None:
    base = cast(Any, load_model(ModelConfig(device="cpu", lora=False)).lm)
    ours = chat("float32", lora=False)
    params = replace(greedy(12), beams=BeamParams(4, 4))
    requests = {p: ours.submit(ours.segments(p), params) for p in PROMPTS[:3]}
    ours.run()
    for prompt, request in requests.items():
        (segment,) = ours.segments(prompt)
        assert isinstance(segment, TextSegment)
        ids = torch.tensor([segment.token_ids])
        ends = sorted(ours.engine.tokenizer.eos_token_ids)
        with torch.no_grad():
            whole = base.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=12,
                num_beams=4,
                num_return_sequences=4,
                do_sample=False,
                eos_token_id=ends,
                pad_token_id=ends[0],
            )
        for choice, row in zip(ours.last(request).choices, whole, strict=True):
            wanted = row[ids.shape[1] :].tolist()
            assert list(choice.token_ids) == wanted[: len(choice.token_ids)], prompt
            assert set(wanted[len(choice.token_ids) :]) <= {ends[0]}


def test_six_beams_behind_a_picture_save_three_quarters_of_their_kv(chats: Any) -> None:
    chat = chats("int8")
    style = "Be exact about colours, shapes and places, and leave out what cannot be seen. " * 20
    params = replace(greedy(32), ignore_eos=True, beams=BeamParams(6, 6))
    request = chat.submit(chat.segments(drawing("circle", "red"), style + "What is it?"), params)
    chat.run()
    usage = chat.last(request).usage
    assert usage.vision_misses == 1 and usage.prompt_tokens < 450
    assert usage.beam_kv_saved >= 0.75

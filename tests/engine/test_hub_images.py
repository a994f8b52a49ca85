"""Images through a stock checkpoint's own processor: its tensors, its runs of tokens, once each."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmserve.config import ImageLimits
from mmserve.engine.hub_images import NoImagePipeline, ProcessorPipeline
from mmserve.errors import (
    ImageTooLargeError,
    InvalidImageError,
    RequestError,
    UnsupportedImageTypeError,
)
from mmserve.model.fetch import ModelUnavailableError
from mmserve.prompt import ImagePart, Message, TextPart
from mmserve.vision.decoder import DecodeHere
from tests.model import families
from tests.model.border import Border, Open, flat, open_border, opener, png, template_of

SMALL, WIDE, TALL = (families.picture(0), families.picture(1, 120, 40), families.picture(2, 33, 90))
FEW_PIXELS = {"size": {"shortest_edge": 784, "longest_edge": 3136}}
M_ROPE = ("qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="session")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Open:
    return opener(tmp_path_factory.mktemp("families"))


def pipeline(border: Border, **options: Any) -> ProcessorPipeline:
    known = border.checkpoint
    made = border.pipeline
    assert made is not None
    options = {"settings_id": b"weights", "decoder": made.decoder, **options}
    return ProcessorPipeline(
        processor=known.processor, template=border.template, config=known.config, **options
    )


@pytest.mark.parametrize("name", families.VISION)
def test_the_tensors_are_those_of_transformers(opened: Open, name: str) -> None:
    border = opened(name)
    image, theirs = border.see(png(WIDE)), border.encode(WIDE, "What?")
    assert image.inputs
    for key, value in image.inputs.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[key])), key
    left_out = set(theirs) - set(image.inputs)
    assert left_out <= {
        *("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "labels"),
        "cross_attention_mask",
    }


@pytest.mark.parametrize("name", families.VISION)
def test_two_images_tensors_are_those_of_transformers_beside_each_other(
    opened: Open, name: str
) -> None:
    border = opened(name)
    pair = [border.see(png(picture), alone=False) for picture in (SMALL, families.picture(5))]
    theirs = border.encode(SMALL, families.picture(5), "What?")
    for key in pair[0].inputs:
        if key == "batch_num_images":
            continue
        axis = 1 if theirs[key].shape[0] == 1 else 0
        joined = torch.cat([image.inputs[key] for image in pair], axis)
        assert torch.equal(joined, theirs[key]), key


@pytest.mark.parametrize("name", families.VISION)
def test_the_run_begins_and_ends_with_image_tokens(opened: Open, name: str) -> None:
    border = opened(name)
    image = border.see(png(TALL))
    if border.template.cross_attention:
        assert image.token_ids == ()
        return
    token = border.checkpoint.image_token_id
    assert token is not None
    assert image.num_tokens == len(image.token_ids)
    assert (image.token_ids[0], image.token_ids[-1]) == (token, token)
    assert flat(border.render(TALL)).count(token) == image.token_ids.count(token)


def test_a_cross_attention_image_counts_the_tiles_in_use(opened: Open) -> None:
    border = opened("mllama")
    vision = border.checkpoint.config.vision_config
    per_tile = (vision.image_size // vision.patch_size) ** 2 + 1
    for picture in (SMALL, WIDE, families.picture(3, 20, 20)):
        image, theirs = border.see(png(picture)), border.encode(picture, "?")
        tiles = int(theirs["cross_attention_mask"].sum(-1).max())
        assert image.num_tokens == tiles * per_tile


@pytest.mark.parametrize("name", M_ROPE)
@pytest.mark.parametrize("picture", [SMALL, WIDE, TALL], ids=["small", "wide", "tall"])
def test_positions_are_those_of_the_model(opened: Open, name: str, picture: Image.Image) -> None:
    border = opened(name)
    model, _ = families.load(border.checkpoint.source.folder)
    inputs = border.encode("a ", picture, " b")
    theirs, _ = model.model.get_rope_index(
        inputs["input_ids"],
        mm_token_type_ids=inputs["mm_token_type_ids"],
        image_grid_thw=inputs["image_grid_thw"],
    )
    image = border.see(png(picture))
    ids = inputs["input_ids"][0].tolist()
    start = ids.index(border.checkpoint.image_token_id)
    end = start + image.num_tokens
    assert np.array_equal(image.positions + start, theirs[:, 0, start:end].numpy())
    assert theirs[0, 0, end] - start == image.width


@pytest.mark.parametrize("name", [n for n in families.VISION if n not in (*M_ROPE, "mllama")])
def test_other_models_positions_simply_count(opened: Open, name: str) -> None:
    image = opened(name).see(png(SMALL))
    assert image.positions is None
    assert image.width == image.num_tokens


def test_only_onevision_minds_how_many_images_there_are(opened: Open) -> None:
    minding = {n for n in families.VISION if opened(n).pipeline.counts_company}  # type: ignore[union-attr]
    assert minding == {"llava_onevision"}
    border = opened("llava_onevision")
    alone, one_of_two = (border.see(png(SMALL), alone=alone) for alone in (True, False))
    assert alone.num_tokens != one_of_two.num_tokens
    assert alone.digest != one_of_two.digest
    assert opened("llava").see(png(SMALL), alone=False).alone is None


def test_a_known_image_is_not_decoded_again(opened: Open) -> None:
    decoded: list[None] = []
    resident: set[bytes] = set()
    made = pipeline(opened("qwen2_5_vl"))
    made.connect(resident.__contains__, lambda: decoded.append(None))
    first = made.prepare(png(SMALL))
    assert (len(decoded), first.inputs is None) == (1, False)
    resident.add(first.digest)
    again = made.prepare(png(SMALL))
    assert (len(decoded), again.inputs) == (1, None)
    assert (again.digest, again.token_ids, again.width) == (
        first.digest,
        first.token_ids,
        first.width,
    )
    restored = made.pixels(again)  # its KV was evicted since
    assert len(decoded) == 2
    assert torch.equal(restored["pixel_values"], first.inputs["pixel_values"])


def test_an_image_known_to_the_pool_alone_is_decoded(opened: Open) -> None:
    made = pipeline(opened("llava"))
    made.connect(lambda _: True, lambda: None)
    assert made.prepare(png(SMALL)).inputs is not None


def test_what_is_remembered_is_bounded(opened: Open) -> None:
    decoded: list[None] = []
    made = pipeline(opened("llava"), max_known=2)
    made.connect(lambda _: True, lambda: decoded.append(None))
    for seed in (0, 1, 2, 2, 1, 0):
        made.prepare(png(families.picture(seed)))
    assert len(decoded) == 4  # the last was forgotten for the third


def test_the_digest_depends_on_bytes_weights_and_the_processor_s_settings(
    opened: Open, tmp_path: Path
) -> None:
    border = opened("qwen2_5_vl")
    base = pipeline(border).prepare(png(SMALL)).digest
    assert pipeline(border).prepare(png(SMALL)).digest == base
    assert pipeline(border).prepare(png(WIDE)).digest != base
    assert pipeline(border, settings_id=b"other").prepare(png(SMALL)).digest != base
    folder = border.checkpoint.source.folder
    smaller = open_border(folder, processor_kwargs=FEW_PIXELS)
    assert pipeline(smaller).prepare(png(SMALL)).digest != base


def test_settings_of_the_processor_change_how_many_tokens_an_image_takes(opened: Open) -> None:
    border = opened("qwen2_5_vl")
    large = families.picture(0, 280, 280)
    smaller = open_border(border.checkpoint.source.folder, processor_kwargs=FEW_PIXELS)
    assert smaller.see(png(large)).num_tokens < border.see(png(large)).num_tokens
    assert flat(smaller.render(large, "?")) == smaller.theirs(large, "?")


def test_an_image_is_upright_and_on_white_as_everywhere_else(opened: Open) -> None:
    border = opened("llava")
    turned, clear = SMALL.copy(), Image.new("RGBA", SMALL.size, (0, 0, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    turned.save(file, "PNG", exif=exif)
    upright = SMALL.transpose(Image.Transpose.ROTATE_270)
    seen, expected = border.see(file.getvalue()), border.see(png(upright))
    assert torch.equal(seen.inputs["pixel_values"], expected.inputs["pixel_values"])
    white = border.see(png(Image.new("RGB", SMALL.size, "white")))
    assert torch.equal(border.see(png(clear)).inputs["pixel_values"], white.inputs["pixel_values"])


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", InvalidImageError),
        (b"GIF?", UnsupportedImageTypeError),
        (png(SMALL)[:-20], InvalidImageError),
    ],
)
def test_a_bad_image_is_refused_with_its_field(
    opened: Open, data: bytes, kind: type[RequestError]
) -> None:
    with pytest.raises(kind) as refused:
        opened("llava").see(data, param="messages[0].content[1]")
    assert refused.value.param == "messages[0].content[1]"


def test_a_size_that_the_processor_does_not_take_is_the_image_s_fault(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    border = opened("qwen2_5_vl")
    assert border.pipeline is not None
    for said, shown in (("too narrow\nfor me", "too narrow"), ("", "ValueError")):

        def process(*_: Any, said: str = said) -> Any:
            raise ValueError(said)

        monkeypatch.setattr(border.pipeline, "_process", process)
        with pytest.raises(InvalidImageError, match=f"not take the image: {shown}$") as refused:
            border.see(png(families.picture(77)), param="image")
        assert refused.value.param == "image"


@pytest.mark.parametrize("name", families.VISION)
@pytest.mark.parametrize("size", [(1, 402), (804, 2)])
def test_a_strip_is_refused_before_it_is_processed(
    opened: Open, name: str, size: tuple[int, int]
) -> None:
    strip = png(Image.new("RGB", size, "red"))
    ratio = max(size) // min(size)
    with pytest.raises(ImageTooLargeError, match=f"{ratio} times.*limit is 200") as refused:
        opened(name).see(strip, param="image")
    assert (refused.value.status, refused.value.param) == (400, "image")


def test_what_a_resize_by_the_shortest_side_makes_is_bounded(opened: Open) -> None:
    border = opened("llava")
    image_processor = border.checkpoint.processor.image_processor
    assert dict(image_processor.size).keys() == {"shortest_edge"}
    edge = image_processor.size["shortest_edge"]
    most = pipeline(border, decoder=DecodeHere(ImageLimits(max_pixels=edge * edge * 20)))
    assert most.prepare(png(Image.new("RGB", (5, 100)))).inputs is not None
    with pytest.raises(ImageTooLargeError, match="would make .* megapixels .*the limit is"):
        most.prepare(png(Image.new("RGB", (5, 105))))


def test_a_processor_whose_error_says_nothing_is_refused_by_its_class(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    border = opened("llava")

    def process(*_: Any, **__: Any) -> Any:
        raise ValueError

    monkeypatch.setattr(ProcessorPipeline, "_process", process)
    with pytest.raises(ModelUnavailableError, match="small images: ValueError"):
        pipeline(border)


def test_a_text_model_takes_no_images() -> None:
    with pytest.raises(RequestError, match="this model takes no images") as refused:
        NoImagePipeline().prepare(png(SMALL), "messages[0]")
    assert (refused.value.status, refused.value.param) == (400, "messages[0]")


def test_a_processor_that_writes_images_in_an_unknown_way_is_refused(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    border = opened("idefics2")
    monkeypatch.setattr("mmserve.hub_prompt._FINISHES", {})
    known = border.checkpoint
    template = template_of(known)
    assert border.pipeline is not None
    with pytest.raises(ModelUnavailableError, match="in a way that is not known here"):
        ProcessorPipeline(
            border.pipeline.decoder, known.processor, template, known.config, settings_id=b""
        )


def test_a_template_that_shows_no_image_is_refused_when_it_is_loaded(opened: Open) -> None:
    border = opened("llava")
    known = border.checkpoint
    template = template_of(
        known,
        "{% for m in messages %}{{ m.content[-1].text }}{% endfor %}",
    )
    assert border.pipeline is not None
    with pytest.raises(ModelUnavailableError, match="LlavaProcessor does not take"):
        ProcessorPipeline(
            border.pipeline.decoder, known.processor, template, known.config, settings_id=b""
        )


def test_images_go_into_the_string_where_a_template_takes_no_items(opened: Open) -> None:
    border = opened("llava")
    known = border.checkpoint
    template = template_of(
        known,
        "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}",
    )
    assert border.pipeline is not None
    made = ProcessorPipeline(
        border.pipeline.decoder, known.processor, template, known.config, settings_id=b""
    )
    parts = (TextPart("a"), ImagePart(b""), TextPart("b"))
    prompt = template.render([Message("user", parts)], [made.prepare(png(SMALL))])
    theirs = known.processor(text="user: a\n<image>\nb", images=SMALL)["input_ids"][0]
    assert flat(prompt) == list(theirs)


def test_threads_share_a_pipeline(opened: Open) -> None:
    border = opened("gemma3")
    files = [png(families.picture(seed % 3, 40 + seed % 3, 40)) for seed in range(12)]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(border.see, files))
    for file, image in zip(files, made, strict=True):
        alone = border.see(file)
        assert image.digest == alone.digest
        assert torch.equal(image.inputs["pixel_values"], alone.inputs["pixel_values"])

"""Checkpoint folders and GGUF files opened: described as they are, or refused in one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmserve.model import memory
from mmserve.model.checkpoint import SamplingDefaults, declared_length, open_checkpoint
from mmserve.model.fetch import ModelUnavailableError
from tests.model import families, tiny_gguf

Fault = Callable[[Path], None]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture
def copy_of(built: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A checkpoint folder that a test may spoil."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(families.build(name, built), tmp_path / name))

    return copy


def complaint(model: Path | str, **options: Any) -> str:
    with pytest.raises(ModelUnavailableError) as refused:
        open_checkpoint(str(model), progress=False, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def change(file: str, **entries: Any) -> Fault:
    """Sets entries of a JSON file of the folder; None takes one out."""

    def spoil(folder: Path) -> None:
        path = folder / file
        data = {**json.loads(path.read_text()), **entries}
        path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))

    return spoil


def drop(*files: str) -> Fault:
    def spoil(folder: Path) -> None:
        for file in files:
            (folder / file).unlink()

    return spoil


def write(file: str, text: str) -> Fault:
    def spoil(folder: Path) -> None:
        (folder / file).write_text(text)

    return spoil


# -- what is said of a good one --------------------------------------------------------------------


@pytest.mark.parametrize("name", (*families.VISION, *families.TEXT))
def test_every_family_opens_as_what_it_is(built: Path, name: str) -> None:
    opened = open_checkpoint(str(families.build(name, built)), progress=False)
    assert opened.name == name
    assert opened.takes_images is (name in families.VISION)
    assert opened.eos_token_ids == {opened.tokenizer.eos_token_id}
    assert opened.sampling == SamplingDefaults()
    model, _ = families.load(opened.source.folder)
    numbers = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    assert opened.weights_bytes(torch.float32) == 4 * numbers
    assert opened.weights_bytes(torch.bfloat16) == 2 * numbers
    if opened.takes_images:
        token = opened.tokenizer.convert_ids_to_tokens(opened.image_token_id)
        assert "im" in token.lower()


def test_a_shorter_context_may_be_asked_for_but_no_longer_one(built: Path) -> None:
    folder = str(families.build("qwen3", built))
    longest = open_checkpoint(folder).max_model_len
    assert open_checkpoint(folder, max_model_len=100).max_model_len == 100
    with pytest.raises(ValueError, match=f"1 to {longest} for qwen3"):
        open_checkpoint(folder, max_model_len=longest + 1)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (None, 4096),
        ({"rope_type": "default"}, 4096),
        ({"rope_type": "linear", "factor": 4.0}, 16384),
        ({"rope_type": "dynamic", "factor": 2.0}, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "yarn", "factor": 2.0}, 8192),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}, 4096),
        ({"rope_type": "longrope", "factor": 8.0}, 4096),
        ({"full_attention": {"rope_type": "linear", "factor": 8.0}}, 4096),
    ],
)
def test_the_context_length_is_as_declared(rope: dict[str, Any] | None, expected: int) -> None:
    config = SimpleNamespace(model_type="x", max_position_embeddings=4096, rope_parameters=rope)
    assert declared_length(config) == expected


def test_a_model_that_declares_no_length_is_refused() -> None:
    with pytest.raises(ModelUnavailableError, match="max_position_embeddings"):
        declared_length(SimpleNamespace(model_type="x", rope_parameters=None))


def test_sampling_and_ends_come_from_the_generation_config(
    copy_of: Callable[[str], Path],
) -> None:
    folder = copy_of("llama_gqa")
    asked = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05}
    change("generation_config.json", eos_token_id=[2, 1], **asked)(folder)
    opened = open_checkpoint(str(folder))
    assert opened.eos_token_ids == {1, 2}
    assert opened.sampling == SamplingDefaults(repetition_penalty=1.05)  # generate is greedy then
    change("generation_config.json", do_sample=True)(folder)
    assert open_checkpoint(str(folder)).sampling == SamplingDefaults(
        0.6, top_p=0.9, top_k=20, repetition_penalty=1.05
    )
    (folder / "generation_config.json").unlink()
    opened = open_checkpoint(str(folder))
    assert opened.eos_token_ids == {opened.tokenizer.eos_token_id}
    assert opened.sampling == SamplingDefaults()


def test_equal_folders_have_equal_weights_and_changed_ones_other(
    copy_of: Callable[[str], Path],
) -> None:
    folder = copy_of("qwen3")
    first = open_checkpoint(str(folder)).weights_id
    assert open_checkpoint(str(folder)).weights_id == first
    change("config.json", rms_norm_eps=1e-3)(folder)
    changed = open_checkpoint(str(folder)).weights_id
    assert changed != first
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(bytes(data))
    assert open_checkpoint(str(folder)).weights_id != changed


def test_a_chat_template_may_be_given(built: Path, tmp_path: Path) -> None:
    folder = str(families.build("qwen3", built))
    file = tmp_path / "mine.jinja"
    file.write_text("mine")
    assert open_checkpoint(folder, chat_template=file).chat_templates == {"default": "mine"}
    assert "cannot be read" in complaint(folder, chat_template=tmp_path / "none.jinja")


def test_several_templates_are_known_by_name(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("qwen3")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert open_checkpoint(str(folder)).chat_templates["tool_use"] == "tools"


# -- GGUF ------------------------------------------------------------------------------------------


def test_a_gguf_file_opens_as_a_text_model(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "tiny.gguf")
    opened = open_checkpoint(str(path))
    assert (opened.name, opened.source.gguf) == ("tiny", "tiny.gguf")
    assert (opened.takes_images, opened.max_model_len) == (False, tiny_gguf.CONTEXT)
    assert opened.eos_token_ids == {2}
    assert opened.chat_templates == {"default": "{{ 'hi' }}"}
    numbers = sum(torch.Size(shape).numel() for shape in tiny_gguf.shapes().values())
    assert opened.weights_bytes(torch.bfloat16) == 2 * numbers


def test_a_gguf_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "tiny.gguf")
    whole = path.read_bytes()
    for size in (0, 100, len(whole) // 2, len(whole) - 64):
        path.write_bytes(whole[:size])
        assert "no whole GGUF file" in complaint(path)


def test_a_gguf_file_of_a_foreign_architecture_is_refused(tmp_path: Path) -> None:
    assert "'clip'" in complaint(tiny_gguf.write(tmp_path / "eyes.gguf", architecture="clip"))


# -- what is refused -------------------------------------------------------------------------------

FAULTS: dict[str, tuple[str, Fault, str]] = {
    "no config": ("qwen3", drop("config.json"), "no checkpoint: it has no config.json"),
    "broken config": ("qwen3", write("config.json", '{"model_type'), "config.json cannot be read"),
    "config is a list": ("qwen3", write("config.json", "[]"), "it is no JSON object"),
    "contradictory config": (
        "qwen3",
        change("config.json", num_hidden_layers="many"),
        "its configuration is refused",
    ),
    "unknown architecture": (
        "qwen3",
        change("config.json", architectures=["FooForCausalLM"], model_type="foo"),
        "architecture (FooForCausalLM) that transformers",
    ),
    "a head that is no language model's": (
        "qwen3",
        change("config.json", architectures=["Qwen3ForTokenClassification"]),
        "architecture (Qwen3ForTokenClassification)",
    ),
    "code of its own": (
        "qwen3",
        change(
            "config.json",
            architectures=["FooForCausalLM"],
            model_type="foo",
            auto_map={"AutoConfig": "foo.FooConfig"},
        ),
        "needs code of its own (trust_remote_code)",
    ),
    "an encoder-decoder": (
        "qwen3",
        change("config.json", is_encoder_decoder=True),
        "is an encoder-decoder",
    ),
    "quantised": (
        "qwen3",
        change("config.json", quantization_config={"quant_method": "awq"}),
        "is quantised (awq)",
    ),
    "no weights": ("qwen3", drop("model.safetensors"), "should hold model.safetensors"),
    "no tokenizer": ("qwen3", drop("tokenizer.json"), "has no tokenizer"),
    "a broken tokenizer": (
        "qwen3",
        write("tokenizer.json", "{}"),
        "its tokenizer cannot be loaded",
    ),
    "no processor": (
        "llava",
        drop("processor_config.json"),
        "takes images but has no processor (processor_config.json or preprocessor_config.json)",
    ),
    "a broken processor": (
        "llava",
        write("processor_config.json", '{"image_processor": {"image_processor_type": "Foo"}}'),
        "its processor cannot be loaded",
    ),
    "no chat template": (
        "qwen3",
        drop("chat_template.jinja"),
        "no chat template (a base model, perhaps); give one with --chat-template FILE",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_sentence_that_names_the_thing(
    copy_of: Callable[[str], Path], fault: str
) -> None:
    name, spoil, expected = FAULTS[fault]
    folder = copy_of(name)
    spoil(folder)
    said = complaint(folder)
    assert expected in said
    assert name in said


def test_a_cut_weight_file_is_refused_before_any_weight_is_read(
    copy_of: Callable[[str], Path],
) -> None:
    folder = copy_of("qwen2_5_vl")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "is not whole" in complaint(folder)


def test_settings_that_the_image_processor_does_not_have_are_refused(built: Path) -> None:
    folder = families.build("qwen2_5_vl", built)
    said = complaint(folder, processor_kwargs={"max_pixel": 3})
    assert "no setting 'max_pixel'" in said
    assert "max_pixels" in said
    text = families.build("qwen3", built)
    assert "takes no images" in complaint(text, processor_kwargs={"max_pixels": 3})


def test_a_gguf_file_for_a_gpu_has_to_fit_into_the_host_s_memory_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_checkpoint(str(tiny_gguf.write(tmp_path / "tiny.gguf")))
    size = opened.weights_bytes(torch.float32)
    free = {"cpu": size, "cuda": size}
    monkeypatch.setattr(memory, "free_bytes", lambda device: free[device.type])
    opened.require_memory(torch.bfloat16, torch.device("cuda"))
    free["cpu"] -= 1
    with pytest.raises(ModelUnavailableError, match="unpacked weights.* free on cpu"):
        opened.require_memory(torch.bfloat16, torch.device("cuda"))


def test_too_little_memory_is_refused_with_the_numbers(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_checkpoint(str(families.build("qwen3", built)))
    cpu = torch.device("cpu")
    size = opened.weights_bytes(torch.float32)
    monkeypatch.setattr(memory, "free_bytes", lambda _: size + 1000)
    opened.require_memory(torch.float32, cpu, pools=1000)
    with pytest.raises(ModelUnavailableError, match="weights in float32 .* KV pools.* on cpu"):
        opened.require_memory(torch.float32, cpu, pools=1001)

"""The command line: flags into the configuration tree, and faults said in one sentence."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import platformdirs
import pytest

from mmserve import __version__
from mmserve.__main__ import build_parser, data_dir
from mmserve.config import MIB, EngineConfig, SpecConfig, StageConfig, TierConfig
from mmserve.engine_flags import engine_config, tier_config
from mmserve.stages.command import KEY, staged
from tests.model import families


@pytest.fixture(autouse=True)
def no_cache_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


def parse(*flags: str) -> EngineConfig:
    return engine_config(build_parser().parse_args(["serve", *flags]))


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The last line of what argparse says before it exits with 2."""
    with pytest.raises(SystemExit) as end:
        build_parser().parse_args(words)
    assert end.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def run(*words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mmserve", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def complaint(*words: str, status: int = 1) -> str:
    """The last line a failing command prints; a loading message may stand before it."""
    result = run(*words)
    assert result.returncode == status
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("mmserve: ")
    return line


# -- flags to configuration ----------------------------------------------------------------------


def test_no_flags_give_the_configuration_tree_s_own_defaults() -> None:
    assert parse() == EngineConfig()


def test_the_tiers_lie_in_the_data_folder_and_may_be_none() -> None:
    def tiers(folder: Path | None, *flags: str) -> TierConfig:
        return tier_config(build_parser().parse_args(["serve", *flags]), folder)

    assert tiers(Path("data")) == TierConfig(None, 4 << 30, Path("data/kv"), None)
    assert tiers(None).folder is None
    flags = ("--host-kv-bytes", "1G", "--disk-kv-bytes", "0", "--kv-object-store", "s3://bucket")
    assert tiers(None, *flags) == TierConfig(1 << 30, 0, None, "s3://bucket")


def test_flags_reach_their_place_in_the_tree() -> None:
    config = parse(
        *("--model", "other", "--served-model-name", "me", "--dtype", "float32"),
        *("--device", "cpu", "--no-lora", "--max-model-len", "2048", "--num-threads", "3"),
        *("--cache-dir", "/somewhere", "--no-enable-prefix-caching"),
        *("--kv-cache-memory-bytes", "64M", "--vision-kv-cache-memory-bytes", "32MiB"),
        *("--max-num-seqs", "7", "--max-num-batched-tokens", "99", "--limit-mm-per-prompt", "5"),
    )
    model = config.model
    assert (model.model, model.served_name, model.dtype) == ("other", "me", "float32")
    assert (model.device, model.lora, model.max_model_len) == ("cpu", False, 2048)
    assert (model.num_threads, model.cache_dir) == (3, Path("/somewhere"))
    assert config.cache.text_bytes == 64 * MIB
    assert config.cache.vision_bytes == 32 * MIB
    assert config.cache.prefix_caching is False
    assert config.scheduler.max_num_seqs == 7
    assert config.scheduler.max_num_batched_tokens == 99
    assert config.images.max_images == 5


def test_stages_are_counted_placed_or_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    words = "encode=2,prefill=cuda:1,prefill=10.0.0.2:9000"
    args = build_parser().parse_args(["serve", "--stages", words])
    assert args.stages == (*(("encode", "2"), ("prefill", "cuda:1"), ("prefill", "10.0.0.2:9000")),)
    for wrong in ("decode=1", "encode", "encode=0", "prefill=gpu", "prefill=/a/b:1"):
        assert repr(wrong) in refusal(capsys, "serve", "--stages", wrong)


def test_workers_elsewhere_need_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)
    with pytest.raises(ValueError, match=KEY), staged(EngineConfig(), [("prefill", "a:1")]):
        pass
    monkeypatch.setenv(KEY, "open sesame")
    with staged(EngineConfig(), [("prefill", "a:1")]) as config:
        assert config.stages == StageConfig(prefill=("a:1",), key=b"open sesame")


def test_the_vision_mode_reaches_its_place_in_the_tree() -> None:
    model = parse("--vision-mode", "blend", "--blend-tokens", "64").model
    assert (model.vision_mode, model.blend_tokens) == ("blend", 64)


def test_flags_of_public_checkpoints_reach_their_place_in_the_tree(tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("hi")
    settings = '{"size": {"longest_edge": 3136}}'
    config = parse("--chat-template", str(template), "--mm-processor-kwargs", settings)
    assert config.model.chat_template == template
    assert config.model.processor_kwargs == {"size": {"longest_edge": 3136}}


def test_the_cache_folder_follows_xdg_unless_a_flag_names_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert parse().model.cache_dir == Path("/xdg/mmserve")
    assert parse("--cache-dir", "/flag").model.cache_dir == Path("/flag")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("1k", 1024),
        ("512M", 512 * MIB),
        ("1.5GiB", 1536 * MIB),
        ("2gb", 2048 * MIB),
    ],
)
def test_sizes_take_units(text: str, expected: int) -> None:
    assert parse("--kv-cache-memory-bytes", text).cache.text_bytes == expected


@pytest.mark.parametrize("text", ["", "much", "-1G", "0", "1.2.3M", "G", "1e999"])
def test_a_bad_size_is_refused_by_name(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "serve", f"--kv-cache-memory-bytes={text}")
    assert "--kv-cache-memory-bytes" in line
    assert repr(text) in line


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--max-num-seqs", "0", "1 or more"),
        ("--max-model-len", "many", "1 or more"),
        ("--num-threads", "²", "1 or more"),
        ("--port", "99999", "65535"),
        ("--port", "http", "65535"),
        ("--dtype", "int3", "invalid choice"),
        ("--vision-mode", "sideways", "invalid choice"),
        ("--blend-tokens", "0", "1 or more"),
        ("--blend-tokens", "half", "1 or more"),
        ("--api-key-file", "/nowhere/keys", "no file"),
        ("--chat-template", "/nowhere/mine.jinja", "no file"),
        ("--mm-processor-kwargs", "[1]", "no JSON object"),
        ("--mm-processor-kwargs", "{", "no JSON object"),
        ("--ssl-certfile", "/nowhere/cert.pem", "no file"),
        ("--slo-ttft-ms", "soon", "number of milliseconds"),
        ("--slo-itl-ms", "-1", "number of milliseconds"),
        ("--drain-seconds", "-1", "number of seconds"),
    ],
)
def test_a_bad_value_is_refused_by_name(
    flag: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, "serve", flag, value)
    assert flag in line
    assert said in line


def test_a_command_is_demanded(capsys: pytest.CaptureFixture[str]) -> None:
    assert "command" in refusal(capsys)


@pytest.mark.parametrize(
    ("flags", "variable", "expected"),
    [
        ((), "none", None),
        ((), "/variable", Path("/variable")),
        (("--data-dir", "/flag"), "/variable", Path("/flag")),
        (("--data-dir", "none"), "/variable", None),
        ((), "", platformdirs.user_data_path("mmserve", appauthor=False)),
    ],
)
def test_the_data_folder_is_the_flags_the_variables_or_the_platforms(
    flags: tuple[str, ...],
    variable: str,
    expected: Path | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MMSERVE_DATA_DIR", variable)
    assert data_dir(build_parser().parse_args(["serve", *flags])) == expected


# -- the program ---------------------------------------------------------------------------------


def test_the_version_is_printed_without_loading_pytorch() -> None:
    probe = "import sys, mmserve.__main__; print('torch' in sys.modules)"
    command = [sys.executable, "-c", probe]
    loaded = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert loaded.stdout.strip() == "False"
    assert run("--version").stdout.strip() == __version__


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.slow
def test_serving_on_a_busy_port_ends_at_once_with_a_sentence(busy_port: int) -> None:
    line = complaint("serve", "--port", str(busy_port))
    assert "in use" in line
    assert str(busy_port) in line


@pytest.mark.slow
def test_serving_an_unknown_model_names_the_known_ones() -> None:
    line = complaint("serve", "--port", "0", "--model", "nope", status=2)
    assert "'nope'" in line
    assert "smolvision-135m" in line


@pytest.mark.slow
def test_serving_a_folder_that_is_no_checkpoint_names_it(tmp_path: Path) -> None:
    line = complaint("serve", "--port", "0", "--model", str(tmp_path), status=2)
    assert str(tmp_path) in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [
        ("llava", ("--vision-mode", "isolated"), "trained with images that see the text"),
        ("llava", ("--vision-mode", "blend", "--blend-tokens", "10"), "a multiple of 16"),
        ("gemma3", ("--vision-mode", "blend"), "which gemma3 has not"),
    ],
)
def test_serving_in_a_mode_that_cannot_be_ends_with_a_sentence(
    name: str, flags: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    folder = families.build(name, tmp_path)
    line = complaint("serve", "--port", "0", "--model", str(folder), *flags, status=2)
    assert said in line


@pytest.mark.slow
def test_serving_from_a_data_folder_that_cannot_be_ends_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "data")
    line = complaint("serve", "--port", "0", "--data-dir", folder)
    assert "cannot write to" in line and folder in line
    flags = ("--data-dir", "none", "--database-url", "postgresql+psycopg://nowhere/x")
    assert "data folder" in complaint("serve", "--port", "0", *flags, status=2)


@pytest.mark.slow
def test_serving_the_world_without_a_key_is_refused() -> None:
    assert "API key" in complaint("serve", "--host", "0.0.0.0", "--port", "0", status=2)


@pytest.mark.slow
def test_chat_names_a_file_it_cannot_read() -> None:
    assert "/nowhere/cat.png" in complaint("chat", "/nowhere/cat.png", "What is it?")


@pytest.mark.slow
@pytest.mark.model
def test_chat_refuses_what_is_no_picture(tmp_path: Path) -> None:
    file = tmp_path / "cat.png"
    file.write_text("meow")
    line = complaint("chat", str(file), "What is it?", status=2)
    assert str(file) in line
    assert "PNG" in line


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "lines"), [("blend", 1), ("prefix", 0)])
def test_chat_says_that_a_blended_answer_is_approximate(
    mode: str, lines: int, tmp_path: Path
) -> None:
    file = tmp_path / "cat.png"
    families.picture(3).save(file)
    model = str(families.build("qwen2_5_vl", tmp_path))
    flags = ("--model", model, "--max-tokens", "4", "--vision-mode", mode)
    result = run("chat", str(file), "What is it?", *flags)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("an approximate answer") == lines


@pytest.mark.slow
@pytest.mark.model
def test_chat_answers_about_a_picture(tmp_path: Path) -> None:
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (224, 224), "white")
    ImageDraw.Draw(image).ellipse((60, 60, 164, 164), fill=(220, 30, 30))
    file = tmp_path / "shape.png"
    image.save(file)
    result = run("chat", str(file), "What color is the circle?")
    assert result.returncode == 0, result.stderr
    assert "red" in result.stdout.lower()


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("none", SpecConfig(method=None)),
        ("suffix", SpecConfig("suffix")),
        ('{"method": "ngram", "prompt_lookup_max": 4}', SpecConfig("ngram", prompt_lookup_max=4)),
        ('{"model": "small"}', SpecConfig("draft_model", "small")),
        ('{"method": "eagle3", "model": "x"}', SpecConfig("eagle", "x")),
    ],
)
def test_drafting_is_named_in_a_word_or_in_vllm_s(text: str, config: SpecConfig) -> None:
    assert parse("--speculative-config", text).speculative == config


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fast", "method 'fast' is none of auto, ngram"),
        ('{"method": "ngram", "tokens": 3}', "'tokens' is none of method, model"),
        ('{"method": "ngram", "num_speculative_tokens": 64}', "64 is not between 1 and 63"),
        ('{"method": "ngram", "num_speculative_tokens": "3"}', "'3' is no int"),
        ('{"method": "ngram", "model": "x"}', "the method ngram takes no model"),
        ('{"method": "draft_model"}', "draft_model needs a model"),
        ("{", "is no JSON object"),
    ],
)
def test_drafting_that_cannot_be_is_refused_in_one_sentence(
    text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refusal(capsys, "serve", "--speculative-config", text)

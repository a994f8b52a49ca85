"""A public checkpoint, opened: checked, identified and described before any weight is loaded.

Owns what is demanded of a folder (or GGUF file) that transformers is to load, and what its files
say about lengths, ends of turns and sampling. Each fault is one sentence, raised as
`ModelUnavailableError`. No code that comes with a checkpoint is ever run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from transformers import AutoConfig
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from mmserve.errors import first_line
from mmserve.model import memory
from mmserve.model.fetch import ModelUnavailableError
from mmserve.model.hub import Source, locate
from mmserve.model.processor import chat_template_of, load_processor, tokenizer_of
from mmserve.model.rope import asked, reach, scaled_config
from mmserve.model.shards import Shard, bytes_in_memory, find_shards, identify
from mmserve.vision.preprocess import fingerprint


@dataclass(frozen=True)
class SamplingDefaults:
    """What generation_config.json asks for; a request's own parameters have the last word."""

    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class Checkpoint:
    """A model that transformers can load, known to be whole. Lengths in tokens."""

    name: str  # the hub id, or the folder's or file's name
    source: Source
    config: Any  # transformers' PretrainedConfig
    processor: Any  # its ProcessorMixin where it takes images, else the tokenizer
    chat_templates: dict[str, str]  # by name; `default` is there
    takes_images: bool
    max_model_len: int
    rope_scaling: dict[str, Any] | None  # on demand, as `rope.asked` makes it
    eos_token_ids: frozenset[int]
    sampling: SamplingDefaults
    shards: tuple[Shard, ...]
    weights_id: bytes  # [32]: equal ids, equal weights and config

    @property
    def tokenizer(self) -> Any:
        return tokenizer_of(self.processor)

    @property
    def text_config(self) -> Any:
        """The language model's part of the config."""
        return self.config.get_text_config()

    @property
    def image_token_id(self) -> int | None:
        """The token at whose places the model puts image features."""
        return _image_token_id(self.config)

    def weights_bytes(self, dtype: torch.dtype) -> int:
        """Of all weights when the floating-point ones are held in `dtype`."""
        return bytes_in_memory(self.shards, dtype.itemsize)

    def require_memory(self, dtype: torch.dtype, device: torch.device, pools: int = 0) -> None:
        """Raises `ModelUnavailableError` unless weights and `pools` bytes of KV fit."""
        weights = f"weights in {str(dtype).removeprefix('torch.')}"
        parts = {weights: self.weights_bytes(dtype)} | ({"KV pools": pools} if pools else {})
        memory.require(self.name, parts, device, memory.free_bytes(device))
        if self.source.gguf is not None and device.type != "cpu":
            # transformers makes plain numbers of all tensors there before it moves the first.
            host = torch.device("cpu")
            unpacked = {"unpacked weights": self.weights_bytes(torch.float32)}
            memory.require(self.name, unpacked, host, memory.free_bytes(host))


def open_checkpoint(
    model: str,
    *,
    max_model_len: int | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
    processor_kwargs: Mapping[str, Any] | None = None,
    chat_template: Path | None = None,
    progress: bool = True,
) -> Checkpoint:
    """What `--model` names, fetched if need be, and checked up to the first byte of weights.

    `rope_scaling` is for sequences beyond the trained length (`--rope-scaling`),
    `processor_kwargs` are settings of the image processor (`--mm-processor-kwargs`),
    `chat_template` a file that takes the place of the checkpoint's own. Raises
    `ModelUnavailableError`, and `ValueError` for a `max_model_len` beyond the model's own, or
    scaling that does not fit it.
    """
    source = locate(model, progress)
    name = _name(model, source)
    if source.gguf is None:
        takes_images = _kind(name, source.folder)
        shards = find_shards(source.folder)
    else:
        takes_images = False
        shards = (_gguf_shard(source.folder / source.gguf),)
    config = _config(name, source)
    if takes_images and _image_token_id(config) is None:
        raise ModelUnavailableError(f"{name} takes images, but its config names no image token")
    processor = load_processor(name, source, takes_images, processor_kwargs or {})
    longest = declared_length(config.get_text_config())
    scaling = asked(rope_scaling, longest) if rope_scaling else None
    if scaling:
        scaled_config(config.get_text_config(), scaling)
        longest = reach(scaling)
    if max_model_len is not None and not 0 < max_model_len <= longest:
        raise ValueError(f"max_model_len must be 1 to {longest} for {name}")
    generation = _read_json(source.folder / "generation_config.json", optional=True)
    if source.gguf is not None:
        generation = {}  # of a GGUF file nothing but the file itself counts
    files = [shard.path for shard in shards]
    written = b"" if source.gguf is not None else (source.folder / "config.json").read_bytes()
    return Checkpoint(
        name=name,
        source=source,
        config=config,
        processor=processor,
        chat_templates=chat_template_of(name, processor, chat_template),
        takes_images=takes_images,
        max_model_len=max_model_len or longest,
        rope_scaling=scaling,
        eos_token_ids=_eos(generation, config, tokenizer_of(processor)),
        sampling=_sampling(generation),
        shards=shards,
        weights_id=fingerprint(("config", written), *identify(files)),
    )


def declared_length(text_config: Any) -> int:
    """Positions the model declares, rope scaling counted as vLLM counts it.

    `max_position_embeddings` is the scaled length for llama3 and longrope, and where scaling is
    given by layer type (Gemma 3); for linear, dynamic and YaRN it is the length before scaling.
    """
    longest = int(getattr(text_config, "max_position_embeddings", 0) or 0)
    if longest < 1:
        raise ModelUnavailableError(
            f"{text_config.model_type} declares no max_position_embeddings; its context length is "
            "unknown"
        )
    rope = getattr(text_config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in ("linear", "dynamic", "yarn"):
        return longest
    if kind == "yarn":
        longest = int(rope.get("original_max_position_embeddings") or longest)
    return int(longest * float(rope.get("factor") or 1.0))


def _image_token_id(config: Any) -> int | None:
    for name in ("image_token_id", "image_token_index"):
        if (found := getattr(config, name, None)) is not None:
            return int(found)
    return None


def _name(model: str, source: Source) -> str:
    if source.gguf is not None:
        return source.gguf.removesuffix(".gguf")
    is_path = Path(model).expanduser().is_dir()
    return source.folder.resolve().name if is_path else model


def _kind(name: str, folder: Path) -> bool:
    """Whether the checkpoint takes images; a refusal when transformers cannot load it by itself."""
    data = _read_json(folder / "config.json")
    model_type, declared = data.get("model_type"), data.get("architectures") or []
    if not isinstance(declared, list):
        declared = []
    vision = set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values())
    text = _flat(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    what = declared[0] if declared else model_type
    if model_type not in CONFIG_MAPPING_NAMES or (declared and what not in vision | text):
        if "auto_map" in data:
            raise ModelUnavailableError(
                f"{name} ({what}) needs code of its own (trust_remote_code), and mmserve runs no "
                "code that comes with a checkpoint"
            )
        version = transformers.__version__
        raise ModelUnavailableError(
            f"{name} is of an architecture ({what}) that transformers {version} does not know as "
            "an image-text-to-text or causal language model"
        )
    if data.get("is_encoder_decoder"):
        raise ModelUnavailableError(
            f"{name} ({what}) is an encoder-decoder; mmserve serves decoder-only language models"
        )
    if "quantization_config" in data:
        method = (data["quantization_config"] or {}).get("quant_method", "an unnamed method")
        raise ModelUnavailableError(
            f"{name} is quantised ({method}); mmserve loads unquantised safetensors or GGUF"
        )
    if declared:
        return what in vision
    return model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def _config(name: str, source: Source) -> Any:
    extra = {"gguf_file": source.gguf} if source.gguf else {}
    try:
        return AutoConfig.from_pretrained(
            source.folder, local_files_only=True, trust_remote_code=False, **extra
        )
    except Exception as error:  # a config's own checks raise almost anything
        raise ModelUnavailableError(
            f"{name}: its configuration is refused: {first_line(error)}"
        ) from error


def _gguf_shard(path: Path) -> Shard:
    """A GGUF file's tensors; they become plain floating-point numbers when they are loaded."""
    try:
        reader = gguf.GGUFReader(path)
        field = reader.get_field("general.architecture")
        architecture = str(field.contents()) if field else "none"
        tensors = {str(t.name): int(t.n_elements) for t in reader.tensors}
    except Exception as error:  # the reader meets a cut or foreign file in many ways
        raise ModelUnavailableError(f"{path} is no whole GGUF file: {first_line(error)}") from error
    if architecture not in GGUF_SUPPORTED_ARCHITECTURES:
        raise ModelUnavailableError(
            f"{path} is of architecture {architecture!r}, which transformers "
            f"{transformers.__version__} does not read from GGUF"
        )
    return Shard(path, frozenset(tensors), {"F32": sum(tensors.values())})


def _eos(generation: Mapping[str, Any], config: Any, tokenizer: Any) -> frozenset[int]:
    """What ends an answer, as in `generate`: generation_config's word, else config's, else the
    tokenizer's."""
    own = (config.get_text_config(), config)
    said = [generation.get("eos_token_id"), *(getattr(c, "eos_token_id", None) for c in own)]
    for ids in (*said, tokenizer.eos_token_id):
        if ids is not None and ids != []:
            return frozenset(int(i) for i in (ids if isinstance(ids, (list, tuple)) else [ids]))
    return frozenset()


def _sampling(generation: Mapping[str, Any]) -> SamplingDefaults:
    """As `generate` reads it: without `do_sample` it is greedy whatever temperature is said."""

    def said(name: str, default: float) -> float:
        return float(generation[name]) if generation.get(name) is not None else default

    sampled = bool(generation.get("do_sample"))
    penalty = said("repetition_penalty", 1.0)
    if not sampled:
        return SamplingDefaults(repetition_penalty=penalty)
    return SamplingDefaults(
        temperature=said("temperature", 1.0),
        top_p=said("top_p", 1.0),
        top_k=int(said("top_k", 0)),
        min_p=said("min_p", 0.0),
        repetition_penalty=penalty,
    )


def _read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if optional:
            return {}
        raise ModelUnavailableError(f"{path.parent} is no checkpoint: it has no {path.name}")
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnavailableError(f"{path} cannot be read: {first_line(error)}") from error
    if not isinstance(data, dict):
        raise ModelUnavailableError(f"{path} cannot be read: it is no JSON object")
    return data


def _flat(values: Any) -> set[str]:
    """transformers' mappings name one class for a model type, or several."""
    return {n for v in values for n in (v if isinstance(v, (list, tuple)) else (v,))}

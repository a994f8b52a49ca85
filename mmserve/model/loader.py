"""A configuration to a model in memory: language model, tokenizer and vision path.

Owns the order of loading and the converted copy of the base model. Knows nothing of KV, attention
kernels or requests. Nothing here asks a model hub for anything; the only network use is `fetch`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from mmserve.config import ModelConfig
from mmserve.model import rope
from mmserve.model.adapter import WHOLE_IMAGES, Sight
from mmserve.model.attention import WINDOW
from mmserve.model.fetch import default_cache_dir, fetch_base_model
from mmserve.model.lora import merge_lora
from mmserve.model.shard import Split
from mmserve.model.spec import ModelSpec, Windows, load_spec
from mmserve.vision.model import VisionModel

# Named in the converted copy's folder: a new number when the conversion below changes.
_CONVERSION = 1

# SmolLM2 splits numbers into digits before byte-level BPE. Its GGUF conversion lost that step.
_PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
    ],
}


@dataclass(frozen=True)
class LoadedModel:
    """A native model ready to run: float32 on `device`, evaluation mode, adapter merged.

    The tokenizer reads special tokens in text as plain characters; they are written by id.
    """

    lm: PreTrainedModel
    tokenizer: Tokenizer
    vision: VisionModel
    spec: ModelSpec
    device: torch.device
    rope_scaling: Mapping[str, Any] | None = None  # on demand, as `rope.asked` makes it
    sight: Sight = WHOLE_IMAGES  # how images' tokens see each other

    stock = False  # whether it is all transformers', images too

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def max_model_len(self) -> int:
        return self.spec.max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        eos = self.lm.config.eos_token_id
        return frozenset(eos if isinstance(eos, list) else [eos])


def load_model(cfg: ModelConfig, progress: bool = True, split: Split | None = None) -> LoadedModel:
    """Loads what `cfg` names; fetches and converts the base model the first time. `split`: leaves
    of the language model what is wanted, before it goes to its device.

    Raises `ModelUnavailableError` (no base weights) and `ValueError` (a configuration that does
    not fit the model).
    """
    spec = load_spec(cfg.model, cfg.lora)
    scaling = rope.asked(cfg.rope_scaling, spec.max_model_len) if cfg.rope_scaling else None
    longest = rope.reach(scaling) if scaling else spec.max_model_len
    if cfg.max_model_len is not None and not 0 < cfg.max_model_len <= longest:
        raise ValueError(f"max_model_len must be 1 to {longest} for {spec.name}")
    spec = dataclasses.replace(spec, max_model_len=cfg.max_model_len or longest)
    device = resolve_device(cfg.device)
    folder = _base_model(spec, cfg.cache_dir or default_cache_dir(), progress)
    lm = _language_model(folder, spec)
    if split is not None:
        split(lm)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    vision = VisionModel(spec.vision)
    vision.load_weights(_read(*spec.vision_files))
    vision.eval().to(device)
    return LoadedModel(lm.to(device), tokenizer, vision, spec, device, scaling)


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one, else the CPU. Raises ValueError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("PyTorch finds no CUDA device on this machine")
    return torch.device(name)


def _language_model(folder: Path, spec: ModelSpec) -> PreTrainedModel:
    with _bars(shown=False):
        lm: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
    theta = lm.config.rope_parameters["rope_theta"]
    if theta != spec.rope_theta:
        raise ValueError(f"{spec.name} states rope_theta {spec.rope_theta}, its weights {theta}")
    if spec.lora is not None:
        merge_lora(lm, _read(spec.lora.file), spec.lora.alpha)
    if spec.windows is not None:
        set_windows(lm, spec.windows)
    return lm.eval().requires_grad_(False)


def set_windows(lm: Any, windows: Windows) -> None:
    """Says of each layer what it reads; its own class knows of no windows."""
    for number, layer in enumerate(lm.model.layers):
        setattr(layer.self_attn, WINDOW, windows.of(number))


def _read(*files: Path) -> dict[str, Tensor]:
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _base_model(spec: ModelSpec, cache_dir: Path, progress: bool) -> Path:
    """The converted copy's folder. Reading the GGUF takes about 20 s, the copy under 1 s.

    The copy is float32: the GGUF's 4-bit blocks (float16 scale times integer plus float16 minimum)
    are exact in float32 and not in bfloat16.
    """
    gguf = fetch_base_model(spec.base, cache_dir, progress)
    folder = cache_dir / f"{gguf.stem}-{spec.base.gguf_sha256[:16]}-{_CONVERSION}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix="convert-") as temporary:
            made = Path(temporary) / folder.name
            _convert(gguf, made, progress)
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was first
                    raise
    return folder


def _convert(gguf: Path, folder: Path, progress: bool) -> None:
    source = {"gguf_file": gguf.name, "local_files_only": True}
    with _bars(progress and sys.stderr.isatty()):
        lm = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    # save_pretrained refuses a model that once was a GGUF file, so its two files are written here.
    del lm.config.quantization_config
    lm.config.save_pretrained(folder)
    tensors = {n: t.contiguous() for n, t in lm.state_dict().items() if n != "lm_head.weight"}
    assert lm.config.tie_word_embeddings
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    data["pre_tokenizer"] = _PRE_TOKENIZER
    (folder / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False), "utf-8")
    for file in folder.iterdir():
        with file.open("rb") as written:
            os.fsync(written.fileno())


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """Whether transformers draws progress bars; it draws them for half a second's work, too."""
    log = transformers.utils.logging
    before = log.is_progress_bar_enabled()
    (log.enable_progress_bar if shown else log.disable_progress_bar)()
    try:
        yield
    finally:
        (log.enable_progress_bar if before else log.disable_progress_bar)()

"""A checkpoint's own processor or tokenizer, loaded through transformers and checked.

Owns which files it takes and what is said when they are missing. Loads no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase, ProcessorMixin

from mmserve.errors import first_line
from mmserve.model.fetch import ModelUnavailableError
from mmserve.model.hub import Source

# Models that are prompted by bare text; vLLM, too, gives these a template of its own.
_BARE = ("PaliGemmaProcessor",)
_BARE_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}{{ '<image>' }}{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


def load_processor(name: str, source: Source, takes_images: bool, kwargs: Mapping[str, Any]) -> Any:
    """The processor where the model takes images, else the tokenizer. Raises
    `ModelUnavailableError`."""
    folder = source.folder
    if source.gguf is None and not any((folder / f).is_file() for f in _TOKENIZER_FILES):
        raise ModelUnavailableError(f"{name} has no tokenizer ({_TOKENIZER_FILES[0]} or the like)")
    if takes_images and not any((folder / f).is_file() for f in _PROCESSOR_FILES):
        raise ModelUnavailableError(
            f"{name} takes images but has no processor ({' or '.join(_PROCESSOR_FILES)})"
        )
    if kwargs and not takes_images:
        raise ModelUnavailableError(
            f"{name} takes no images, so --mm-processor-kwargs {', '.join(kwargs)} means nothing"
        )
    spare_num2words()
    extra = {"gguf_file": source.gguf} if source.gguf else dict(kwargs)
    reader = AutoProcessor if takes_images else AutoTokenizer
    what = "processor" if takes_images else "tokenizer"
    try:
        made = reader.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **extra
        )
    except Exception as error:  # it is built from many files, each with faults of its own
        raise ModelUnavailableError(
            f"{name}: its {what} cannot be loaded: {first_line(error)}"
        ) from error
    if takes_images:
        if not isinstance(made, ProcessorMixin) or not hasattr(made, "image_processor"):
            raise ModelUnavailableError(f"{name} takes images but has no image processor")
        _check_kwargs(name, made.image_processor, kwargs)
    if (
        not isinstance(tokenizer_of(made), PreTrainedTokenizerBase)
        or not tokenizer_of(made).is_fast
    ):
        raise ModelUnavailableError(
            f"{name} has no tokenizer.json, nor files that transformers can turn into one"
        )
    return made


def chat_template_of(name: str, processor: Any, file: Path | None = None) -> dict[str, str]:
    """The templates by name, `default` among them: `file`'s (`--chat-template`), else the
    processor's, else its tokenizer's. Raises `ModelUnavailableError` when there is none."""
    if file is not None:
        try:
            return {"default": file.read_text("utf-8")}
        except (OSError, ValueError) as error:
            raise ModelUnavailableError(
                f"the chat template {file} cannot be read: {error}"
            ) from error
    for holder in (processor, tokenizer_of(processor)):
        found = getattr(holder, "chat_template", None)
        if isinstance(found, str) and found:
            return {"default": found}
        if isinstance(found, dict) and "default" in found:
            return {str(key): str(text) for key, text in found.items()}
    if type(processor).__name__ in _BARE:
        return {"default": _BARE_TEMPLATE}
    raise ModelUnavailableError(
        f"{name} has no chat template (a base model, perhaps); give one with --chat-template FILE"
    )


def tokenizer_of(processor: Any) -> Any:
    """The tokenizer in a processor; a tokenizer is its own."""
    return getattr(processor, "tokenizer", processor)


def spare_num2words() -> None:
    """SmolVLM's processor refuses to be built without a package that spells out how many frames a
    video has. Nobody sends videos here, so a stand-in does."""
    from transformers.models.smolvlm import processing_smolvlm

    if processing_smolvlm.num2words is None:
        processing_smolvlm.num2words = str


def _check_kwargs(name: str, image_processor: Any, kwargs: Mapping[str, Any]) -> None:
    known = {
        key
        for kind in type(image_processor).valid_kwargs.__mro__
        for key in getattr(kind, "__annotations__", {})
    }
    if unknown := sorted(set(kwargs) - known):
        raise ModelUnavailableError(
            f"{name}: its image processor has no setting {unknown[0]!r}; it has "
            f"{', '.join(sorted(known))}"
        )

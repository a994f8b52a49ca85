"""Which models are served and how each was tested: the one list that the command line and
docs/models.md show.

Owns names and words only; what a checkpoint needs is decided when it is opened.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

MODELS = Path(__file__).parent.parent / "configs" / "models"  # descriptions of native models

# What a tiny random checkpoint of the family, built and saved by transformers, was compared in.
CHECKS = {
    "prompt": "token ids of conversations with and without images, and the image tensors, equal "
    "those of transformers' own processor",
}
NATIVE_CHECKED = "tested with its own weights, token by token against a dense forward pass"


@dataclass(frozen=True)
class Family:
    """Checkpoints of one architecture. `differs`: what of it the engine has to mind."""

    name: str
    architecture: str  # as config.json names it
    example: str  # a published one, by its hub id
    differs: str
    tests: tuple[str, ...]  # names in tests/model/families.py
    checked: tuple[str, ...] = ("prompt",)


IMAGE_FAMILIES = (
    Family(
        "Idefics2",
        "Idefics2ForConditionalGeneration",
        "HuggingFaceM4/idefics2-8b",
        "Perceiver resampler; sliding window in every layer",
        ("idefics2",),
    ),
    Family(
        "Idefics3",
        "Idefics3ForConditionalGeneration",
        "HuggingFaceM4/Idefics3-8B-Llama3",
        "tiles, with row and column tokens between them",
        ("idefics3",),
    ),
    Family(
        "SmolVLM2",
        "SmolVLMForConditionalGeneration",
        "HuggingFaceTB/SmolVLM2-2.2B-Instruct",
        "as Idefics3",
        ("smolvlm",),
    ),
    Family(
        "LLaVA-1.5, Pixtral",
        "LlavaForConditionalGeneration",
        "llava-hf/llava-1.5-7b-hf",
        "one run of tokens; Pixtral's has a break token after each row",
        ("llava", "pixtral"),
    ),
    Family(
        "LLaVA-OneVision",
        "LlavaOnevisionForConditionalGeneration",
        "llava-hf/llava-onevision-qwen2-7b-ov-hf",
        "tiles only for the one image of a prompt: a second image changes the first one's tokens",
        ("llava_onevision",),
    ),
    Family(
        "Qwen2.5-VL",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "M-RoPE; any resolution; windows in the tower",
        ("qwen2_5_vl",),
    ),
    Family(
        "Qwen3-VL",
        "Qwen3VLForConditionalGeneration",
        "Qwen/Qwen3-VL-8B-Instruct",
        "M-RoPE, interleaved; tower features added to early text layers",
        ("qwen3_vl",),
    ),
    Family(
        "Gemma 3",
        "Gemma3ForConditionalGeneration",
        "google/gemma-3-4b-it",
        "five sliding layers to one full; an image sees itself both ways",
        ("gemma3",),
    ),
    Family(
        "Mistral 3",
        "Mistral3ForConditionalGeneration",
        "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
        "any resolution, a break token after each row",
        ("mistral3",),
    ),
    Family(
        "InternVL",
        "InternVLForConditionalGeneration",
        "OpenGVLab/InternVL3-8B-hf",
        "tiles and a thumbnail",
        ("internvl",),
    ),
    Family(
        "PaliGemma 2",
        "PaliGemmaForConditionalGeneration",
        "google/paligemma2-3b-mix-224",
        "the whole prompt sees itself both ways; no chat template: texts are joined",
        ("paligemma2",),
    ),
    Family(
        "Llama 3.2 Vision",
        "MllamaForConditionalGeneration",
        "meta-llama/Llama-3.2-11B-Vision-Instruct",
        "cross-attention: images are read beside the text",
        ("mllama",),
    ),
)

_SCALED = tuple(f"llama_{kind}" for kind in ("linear", "dynamic", "yarn", "llama3"))
TEXT_FAMILIES = (
    Family(
        "Llama",
        "LlamaForCausalLM",
        "meta-llama/Llama-3.1-8B-Instruct",
        "MHA, GQA and MQA; linear, dynamic, YaRN and llama3 RoPE scaling",
        ("llama_mha", "llama_gqa", "llama_mqa", *_SCALED),
    ),
    Family("Qwen2", "Qwen2ForCausalLM", "Qwen/Qwen2.5-7B-Instruct", "", ("qwen2",)),
    Family("Qwen3", "Qwen3ForCausalLM", "Qwen/Qwen3-8B", "norms on queries and keys", ("qwen3",)),
    Family(
        "Mistral",
        "MistralForCausalLM",
        "mistralai/Mistral-7B-Instruct-v0.3",
        "sliding window where declared",
        ("mistral",),
    ),
    Family(
        "Gemma 2",
        "Gemma2ForCausalLM",
        "google/gemma-2-9b-it",
        "sliding and full layers in turn; softcaps",
        ("gemma2",),
    ),
    Family(
        "Gemma 3, text only",
        "Gemma3ForCausalLM",
        "google/gemma-3-1b-it",
        "five sliding layers to one full",
        ("gemma3_text",),
    ),
    Family(
        "Phi",
        "PhiForCausalLM",
        "microsoft/phi-2",
        "rotary on part of each head; published without a chat template",
        ("phi",),
    ),
    Family("Phi-3", "Phi3ForCausalLM", "microsoft/Phi-3.5-mini-instruct", "LongRoPE", ("phi3",)),
)


def native_models() -> dict[str, str]:
    """Names in `configs/models/`, and the licences of what each is made of."""
    found = {}
    for path in sorted(MODELS.glob("*.json")):
        data = json.loads(path.read_text("utf-8"))
        found[str(data["name"])] = ", ".join(sorted(set(data["licences"].values())))
    return found


def listing() -> str:
    """What `mmserve models` prints."""
    lines = ["Ships with mmserve (--model NAME):"]
    lines += [
        f"  {name}  {licences}; {NATIVE_CHECKED}" for name, licences in native_models().items()
    ]
    for title, families in (
        ("Checkpoints with images", IMAGE_FAMILIES),
        ("Checkpoints of text only", TEXT_FAMILIES),
    ):
        lines += ["", f"{title} (--model FOLDER or HUB_ID):"]
        width = max(len(f.name) for f in families)
        for family in families:
            about = f"{family.architecture}, e.g. {family.example}"
            lines.append(f"  {family.name:{width}}  {about}  [{', '.join(family.checked)}]")
    lines += ["", "Tested with tiny random checkpoints, not with published weights:"]
    lines += [f"  [{name}] {text}" for name, text in CHECKS.items()]
    lines += [
        "",
        "Any other image-text-to-text or causal language model of transformers may be tried; what",
        "its processor does to prompts is compared with ours when it is loaded.",
    ]
    return "\n".join(lines)


def table(families: tuple[Family, ...]) -> str:
    """The rows of docs/models.md."""
    rows = ["| Family | Architecture | For example | What is particular | Checked |"]
    rows.append("| --- | --- | --- | --- | --- |")
    rows += [
        f"| {f.name} | `{f.architecture}` | {f.example} | {f.differs} | {', '.join(f.checked)} |"
        for f in families
    ]
    return "\n".join(rows)

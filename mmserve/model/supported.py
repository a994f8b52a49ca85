"""Which models are served and how each was tested: the one list that the command line and
docs/models.md show.

Owns names and words only; what a checkpoint needs is decided when it is opened.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path

WIDTH = 96  # of running text
MODELS = Path(__file__).parent.parent / "configs" / "models"  # descriptions of native models


def native_json(model: str) -> Path | None:
    """The description that `model` names: the path of one, a name in `configs/models/`, or a folder
    where one stands beside the folder of its files, as there. None: it names none that is there."""
    if model.endswith(".json"):
        return Path(model) if Path(model).is_file() else None
    shipped = MODELS / f"{model}.json"
    if model and shipped.is_file():
        return shipped
    folder = Path(model).expanduser()
    there = folder.glob("*.json") if model and folder.is_dir() else ()
    found = [path for path in there if path.with_suffix("").is_dir()]
    return found[0] if len(found) == 1 else None


# What a tiny random checkpoint of the family, built and saved by transformers, was compared in.
CHECKS = {
    "prompt": "token ids of conversations with and without images, and the image tensors, equal "
    "those of transformers' own processor",
    "tokens": "64 greedy tokens equal those of transformers' `generate` and their logits are "
    "within 1e-3, in float32: alone, found in the prefix cache, in a batch, cut into chunks (24 "
    "tokens), preempted, and over four windows",
}
NATIVE_CHECKED = "tested with its own weights, token by token against a dense forward pass"


@dataclass(frozen=True)
class Family:
    """Checkpoints of one architecture. `differs`: what of it the engine has to mind; `modes`: how
    its images may be served (`--vision-mode`), its own first."""

    name: str
    architecture: str  # as config.json names it
    example: str  # a published one, by its hub id
    differs: str
    tests: tuple[str, ...]  # names in tests/model/families.py
    modes: tuple[str, ...] = ()
    checked: tuple[str, ...] = ("prompt", "tokens")


IN_CONTEXT = ("prefix", "blend")


IMAGE_FAMILIES = (
    Family(
        "Idefics2",
        "Idefics2ForConditionalGeneration",
        "HuggingFaceM4/idefics2-8b",
        "Perceiver resampler; sliding window in every layer",
        ("idefics2",),
        IN_CONTEXT,
    ),
    Family(
        "Idefics3",
        "Idefics3ForConditionalGeneration",
        "HuggingFaceM4/Idefics3-8B-Llama3",
        "tiles, with row and column tokens between them",
        ("idefics3",),
        IN_CONTEXT,
    ),
    Family(
        "SmolVLM2",
        "SmolVLMForConditionalGeneration",
        "HuggingFaceTB/SmolVLM2-2.2B-Instruct",
        "as Idefics3",
        ("smolvlm",),
        IN_CONTEXT,
    ),
    Family(
        "LLaVA-1.5, Pixtral",
        "LlavaForConditionalGeneration",
        "llava-hf/llava-1.5-7b-hf",
        "one run of tokens; Pixtral's has a break token after each row",
        ("llava", "pixtral"),
        IN_CONTEXT,
    ),
    Family(
        "LLaVA-OneVision",
        "LlavaOnevisionForConditionalGeneration",
        "llava-hf/llava-onevision-qwen2-7b-ov-hf",
        "tiles only for the one image of a prompt: a second image changes the first one's tokens",
        ("llava_onevision",),
        IN_CONTEXT,
    ),
    Family(
        "Qwen2.5-VL",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "M-RoPE; any resolution; windows in the tower",
        ("qwen2_5_vl",),
        IN_CONTEXT,
    ),
    Family(
        "Qwen3-VL",
        "Qwen3VLForConditionalGeneration",
        "Qwen/Qwen3-VL-8B-Instruct",
        "M-RoPE, interleaved; tower features added to early text layers",
        ("qwen3_vl",),
        IN_CONTEXT,
    ),
    Family(
        "Gemma 3",
        "Gemma3ForConditionalGeneration",
        "google/gemma-3-4b-it",
        "five sliding layers to one full; an image sees itself both ways",
        ("gemma3",),
        ("prefix",),
    ),
    Family(
        "Mistral 3",
        "Mistral3ForConditionalGeneration",
        "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
        "any resolution, a break token after each row",
        ("mistral3",),
        IN_CONTEXT,
    ),
    Family(
        "InternVL",
        "InternVLForConditionalGeneration",
        "OpenGVLab/InternVL3-8B-hf",
        "tiles and a thumbnail",
        ("internvl",),
        IN_CONTEXT,
    ),
    Family(
        "PaliGemma 2",
        "PaliGemmaForConditionalGeneration",
        "google/paligemma2-3b-mix-224",
        "prompts see themselves whole, both ways; no chat template: texts are joined",
        ("paligemma2",),
        ("prefix",),
    ),
    Family(
        "Llama 3.2 Vision",
        "MllamaForConditionalGeneration",
        "meta-llama/Llama-3.2-11B-Vision-Instruct",
        "cross-attention: images are read beside the text; text before the first picture gets "
        "nothing from it, as in Meta's published code (transformers lets it read every picture)",
        ("mllama",),
        ("isolated",),
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
            modes = f"  ({family.modes[0]} only)" if len(family.modes) == 1 else ""
            lines.append(f"  {family.name:{width}}  {about}{modes}  [{', '.join(family.checked)}]")
    lines += ["", "Tested with tiny random checkpoints, not with published weights:"]
    for name, text in CHECKS.items():
        lines += textwrap.wrap(f"  [{name}] {text}", WIDTH, subsequent_indent="    ")
    lines += [
        "",
        "Vision modes of checkpoints (--vision-mode) are prefix, which is exact, and blend, where",
        "nothing else is said.",
        "",
        "Any other image-text-to-text or causal language model of transformers may be tried; what",
        "its processor does to prompts is compared with ours when it is loaded.",
    ]
    return "\n".join(lines)


def table(families: tuple[Family, ...]) -> str:
    """The rows of docs/models.md."""
    titles = ["Family", "Architecture", "For example", "What is particular", "Modes", "Checked"]
    rows = [titles, ["---"] * len(titles)]
    rows += [
        [
            *(f.name, f"`{f.architecture}`", f.example, f.differs),
            *(", ".join(f.modes), ", ".join(f.checked)),
        ]
        for f in families
    ]
    if not any(f.modes for f in families):  # models of text only have none
        rows = [row[:4] + row[5:] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)

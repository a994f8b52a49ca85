"""Tiny random checkpoints of the model families we serve, and what transformers says they answer.

Owns the weights, the folders, and the reference: transformers' own greedy `generate` in float32 on
the CPU, one sequence at a time. What the checkpoints are made of stands in `family_text` and
`family_vision`.

    folder = build("qwen3_vl", tmp_path)
    answer = reference(folder, chat("What is this?", picture(0)), steps=64)

Weights. A freshly initialised model repeats one token for ever and hardly sees its pictures: norms
are ones, gates are zeros, Gemma's projector is zeros, and weights of 0.02 leave the residual stream
as the embedding put it. So every weight is drawn anew (`_scatter`): matrices with twice the spread
that keeps a vector's length, vectors (norms, biases) with noise around their initial values, gates
a little open. Where head and embedding are tied, each token's likeliest successor would be itself:
the final norm's signs are drawn at random there. Rows of special tokens in the head are zero, so
that no answer ends early or names an image token; tied embeddings of those are zero with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers as hf
from PIL import Image
from torch import Tensor, nn

from mmserve.model.processor import spare_num2words
from tests.model.family_text import TEXT as TEXT_RECIPES
from tests.model.family_vision import VISION as VISION_RECIPES

spare_num2words()

VISION = tuple(VISION_RECIPES)
TEXT = tuple(TEXT_RECIPES)
NO_CHAT_TEMPLATE = ("paligemma2",)

FINAL_NORM = ("language_model.norm.weight", "model.norm.weight")

Message = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What transformers made of one prompt."""

    prompt: list[int]  # input ids as the processor gave them, image tokens expanded
    ids: list[int]  # generated
    logits: Tensor  # float32 [len(ids), vocab_size], each row what its id was chosen from
    inputs: dict[str, Any]  # everything the processor returned, as tensors

    def lead(self) -> float:
        """The closest any choice was: how far the runner-up's logit lay behind. Equality of tokens
        is only to be asked for where this is well above the arithmetic's error."""
        best = self.logits.topk(2).values
        return float((best[:, 0] - best[:, 1]).min())


def build(name: str, parent: Path) -> Path:
    """Writes the checkpoint of family `name` into `parent / name`, if it is not there yet."""
    folder = parent / name
    if folder.exists():
        return folder
    recipe = {**VISION_RECIPES, **TEXT_RECIPES}[name]()
    kind = hf.AutoModelForImageTextToText if name in VISION else hf.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # what `_scatter` adds to is partly random too
        model = kind.from_config(recipe.config, dtype=torch.float32)
    tokenizer = tokenizer_of(recipe.processor)
    _scatter(model, tokenizer.all_special_ids)
    model.generation_config = hf.GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    recipe.processor.save_pretrained(folder)
    return folder


@torch.no_grad()
def _scatter(model: nn.Module, special: Sequence[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    head = cast(Any, model).get_output_embeddings()
    tied = head.weight is cast(Any, model).get_input_embeddings().weight
    for name, weight in sorted(model.named_parameters()):
        noise = torch.empty_like(weight).normal_(generator=generator)
        if "gate" in name and weight.numel() == 1:
            weight.fill_(0.3)
        elif tied and name.endswith(FINAL_NORM):
            weight.copy_(noise - 1)
        elif weight.dim() < 2:
            weight.add_(0.2 * noise + (3 if tied and "post_" in name else 0))
        elif "embed" in name or "latents" in name:
            weight.copy_(noise * (0.4 if tied else 1))
        else:
            weight.copy_(2 * noise / weight[0].numel() ** 0.5)
    spoken = [token for token in special if token < head.weight.shape[0]]
    head.weight[spoken] = 0
    if head.bias is not None:
        head.bias[spoken] = 0


def tokenizer_of(processor: Any) -> Any:
    return getattr(processor, "tokenizer", processor)


def picture(seed: int, width: int = 56, height: int = 42) -> Image.Image:
    """A picture of coarse random blocks, so that resizing leaves pictures apart."""
    blocks = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)


def chat(*parts: str | Image.Image) -> list[Message]:
    """One user message of texts and pictures in this order; of text alone, a plain string."""
    if all(isinstance(part, str) for part in parts):
        return [{"role": "user", "content": "".join(cast(Sequence[str], parts))}]
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def load(folder: Path, attention: str = "eager") -> tuple[Any, Any]:
    """The model (float32, CPU) and its processor or tokenizer, by transformers' Auto classes.

    Eager attention, because Gemma 2 (softcap) loads with no other.
    """
    vision = hasattr(hf.AutoConfig.from_pretrained(folder), "vision_config")
    kind = hf.AutoModelForImageTextToText if vision else hf.AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    reader = hf.AutoProcessor if vision else hf.AutoTokenizer
    return model.eval(), reader.from_pretrained(folder)


def reference(
    folder: Path,
    messages: list[Message] | str,
    images: Sequence[Image.Image] = (),
    steps: int = 64,
) -> Answer:
    """Greedy continuation by exactly `steps` tokens, end-of-turn tokens never being chosen.

    `messages` go through the model's chat template with the pictures inside them; a plain string is
    a finished prompt with the model's own placeholders, and `images` are its pictures.
    """
    model, processor = load(folder)
    inputs = encode(processor, messages, images)
    return answer(model, inputs, steps)


def encode(
    processor: Any, messages: list[Message] | str, images: Sequence[Image.Image] = ()
) -> dict[str, Any]:
    """What the processor alone makes of a conversation: ids and picture tensors."""
    if isinstance(messages, str):
        pictures = {"images": list(images)} if images else {}
        if not hasattr(processor, "image_processor") or images:
            return dict(processor(text=messages, return_tensors="pt", **pictures))
        return dict(tokenizer_of(processor)(messages, return_tensors="pt"))
    return dict(
        processor.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
    )


@torch.no_grad()
def answer(model: Any, inputs: dict[str, Any], steps: int) -> Answer:
    out = model.generate(
        **inputs,
        max_new_tokens=steps,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    prompt = inputs["input_ids"][0].tolist()
    return Answer(
        prompt=prompt,
        ids=out.sequences[0, len(prompt) :].tolist(),
        logits=torch.cat(out.logits).float(),
        inputs=inputs,
    )

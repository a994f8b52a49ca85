"""How far text-only answers are from the base model's: KL per token, in process.

Owns the prompts' number and the divergence. The answers are the base model's own, greedily.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from mmserve.config import ModelConfig
from mmserve.model.loader import LoadedModel, load_model
from mmserve.prompt import ChatTemplate, Message, TextPart
from mmserve.request import TextSegment
from mmserve.tokenizer import Tokenizer
from mmserve.train_drafter.questions import about_text

SEED = 20  # of the prompts
ANSWER_TOKENS = 48  # of the base model's answer, at most


class TextDistance(NamedTuple):
    """Over all tokens of the base model's answers."""

    prompts: int
    tokens: int
    kl: float  # nats a token, of the model from the base model
    same_best: float  # percent of tokens at which both prefer the same


def measure(config: ModelConfig, prompts: int) -> TextDistance:
    model = load_model(config, progress=False)
    base = load_model(dataclasses.replace(config, lora=False), progress=False)
    return compare(model, base, prompts)


@torch.inference_mode()
def compare(model: LoadedModel, base: LoadedModel, prompts: int) -> TextDistance:
    chance = random.Random(SEED)
    kl, same, tokens = 0.0, 0, 0
    for _ in tqdm(range(prompts), "text", file=sys.stderr):  # 200 take some minutes on a CPU
        prompt = rendered(base, about_text(chance))
        answer = greedy(base, prompt)
        ids = torch.cat([prompt, answer], dim=1)
        own, theirs = (log_probabilities(m, ids, prompt.shape[1]) for m in (model, base))
        kl += float((theirs.exp() * (theirs - own)).sum())
        same += int((own.argmax(-1) == theirs.argmax(-1)).sum())
        tokens += answer.shape[1]
    return TextDistance(prompts, tokens, kl / tokens, 100 * same / tokens)


def rendered(model: LoadedModel, text: str) -> Tensor:
    """The prompt's tokens, [1, L] int64."""
    tokenizer = Tokenizer(model.tokenizer, eos_tokens=("<|im_end|>",))
    template = ChatTemplate(tokenizer, system=model.spec.system_prompt)
    prompt = template.render([Message("user", (TextPart(text),))], [])
    ids = [t for s in prompt.segments if isinstance(s, TextSegment) for t in s.token_ids]
    return torch.tensor([ids], device=model.device)


def greedy(model: LoadedModel, prompt: Tensor) -> Tensor:
    """What the model answers, [1, A] int64, with the token that ends it."""
    ends = sorted(model.eos_token_ids)
    said: Tensor = model.lm.generate(
        prompt, do_sample=False, max_new_tokens=ANSWER_TOKENS, eos_token_id=ends, pad_token_id=0
    )
    return said[:, prompt.shape[1] :]


def log_probabilities(model: LoadedModel, ids: Tensor, start: int) -> Tensor:
    """Of each token from `start` on, [L - start, vocabulary] float32."""
    logits: Tensor = model.lm(ids, use_cache=False).logits[0, start - 1 : -1]
    return torch.log_softmax(logits.float(), dim=-1)

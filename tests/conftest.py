"""Fixtures that several parts share: a tokenizer that needs no download."""

from __future__ import annotations

import os

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from mmserve.tokenizer import Tokenizer

# Read when PyTorch is first imported; see mmserve.__main__._share_cores.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="session")
def bpe() -> tokenizers.Tokenizer:
    """A small byte-level BPE that splits digits, as the default model's tokenizer does."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    text = (
        "system user assistant tool Image What is this? a red circle, 12 blue squares 汉字汉字 😀😀"
    )
    backend.train_from_iterator(
        [text] * 4,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return backend


@pytest.fixture(scope="session")
def tokenizer(bpe: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(bpe, eos_tokens=["<|im_end|>", "<|endoftext|>"])

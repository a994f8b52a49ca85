"""What several parts share: a tokenizer that needs no download, one computing thread, patience."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, settings
from tokenizers import decoders, models, pre_tokenizers, trainers

from mmserve.tokenizer import Tokenizer

# Read when PyTorch is first imported; see mmserve.__main__._share_cores.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

# Read when Triton's kernels are first imported, which importing transformers does.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What a test proves must not depend on how fast the machine is, or how long it stands still.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# No server that a test starts writes to the user's own data folder.
os.environ["MMSERVE_DATA_DIR"] = "none"

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """For tiny tensors: on a busy machine, waiting for a second thread costs far more."""
    import numba
    import torch

    before = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    numba.set_num_threads(before[1])


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """What a test draws without a seed of its own it draws again when it is repeated."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def whole_floats() -> None:
    """Convolutions on a GPU round float32 to 10 bits unless told not to."""
    import torch

    torch.backends.cudnn.allow_tf32 = False


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

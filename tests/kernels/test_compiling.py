"""What the interpreter does not see: whether kernels compile at sizes of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there all kernels' tests compile them")
@pytest.mark.parametrize("part", ["formats", "rest", "decoding"])
def test_every_kernel_compiles_at_the_smallest_sizes_and_decoding_spills_nothing(
    part: str, tmp_path: Path
) -> None:
    cache = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.kernels.compiling", part]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | cache, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

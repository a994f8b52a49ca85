"""No request waits for a compiler: in a process of its own, where nothing is compiled yet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
sys.path.append({root!r})
from mmserve.kernels import cpu, int8
from tests.engine.driver import Driver, picture, words
from tests.engine.tiny import build_tiny, tiny_config

def compiled():
    # Those that another kernel calls are compiled into it.
    return {{name: len(kernel.signatures) for name, kernel in (vars(int8) | vars(cpu)).items()
            if hasattr(kernel, "signatures") and name != "quantize_row"
            and not name.startswith("_")}}

driver = Driver(build_tiny(tiny_config(dtype="int8")))
before = compiled()
assert before and all(before.values()), before
for _ in range(2):
    driver.submit((words(1, 20), driver.image(picture(2)), words(3, 9)))
driver.submit((words(4, 30),))
driver.run()
assert compiled() == before, (before, compiled())
"""


def test_every_kernel_is_compiled_before_the_first_request() -> None:
    script = SCRIPT.format(root=str(ROOT))
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-2000:]

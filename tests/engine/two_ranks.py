"""An engine of two ranks that says whose its other one is and waits for its end.

Run: python -m tests.engine.two_ranks
"""

import time
from dataclasses import replace

from mmserve.engine.ranks import parallel_engine
from tests.engine import recipes
from tests.engine.tiny import tiny_config

if __name__ == "__main__":
    engine = parallel_engine(replace(tiny_config(), tensor_parallel_size=2), recipes.tiny)
    print(*(process.pid for process in engine.runner.team.processes), flush=True)  # type: ignore[attr-defined]
    time.sleep(600)

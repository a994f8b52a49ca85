"""A server in a process of its own, over the fake engine and a data folder: made to be killed.

Run: python tests/server/mortal.py FOLDER (prints its address once it is ready).
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from mmserve.config import ServerConfig
from mmserve.prompt import Prompt
from mmserve.request import ImageSegment
from mmserve.server.runner import make_server
from tests.server.fake_engine import FakeEngine


class Recaller(FakeEngine):
    """Its answer depends on every token and picture of the prompt."""

    def answer(self, prompt: Prompt) -> str:
        whole = hashlib.sha256()
        for segment in prompt.segments:
            if isinstance(segment, ImageSegment):
                whole.update(segment.image.digest)
            else:
                whole.update(bytes(token % 256 for token in segment.token_ids))
        return " ".join(f"{byte:02x}" for byte in whole.digest())


def main() -> None:
    make_server(ServerConfig(port=0, data_dir=Path(sys.argv[1])), Recaller()).run()


if __name__ == "__main__":
    main()

"""`mmserve chat FILE… QUESTION`: one answer on the terminal, without a server.

Owns reading the files and printing. Knows nothing of flags or HTTP.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from mmserve.config import EngineConfig
from mmserve.engine.async_engine import AsyncEngine
from mmserve.errors import RequestError
from mmserve.prompt import ImagePart, Message, TextPart
from mmserve.request import SamplingParams


async def _answer(config: EngineConfig, parts: list[ImagePart], question: str, limit: int) -> None:
    engine = AsyncEngine(config)
    await engine.start()
    try:
        prompt = await engine.prepare([Message("user", (*parts, TextPart(question)))])
        params = SamplingParams(max_tokens=limit, temperature=0.0)
        async for event in engine.submit("chat", prompt, params):
            print(event.text, end="", flush=True)
        print()
        if engine.info.vision_mode == "blend":
            print("mmserve: an approximate answer (--vision-mode blend)", file=sys.stderr)
    finally:
        await engine.stop()


def chat(config: EngineConfig, files: list[Path], question: str, max_tokens: int) -> None:
    """Print the model's answer about the images in `files`.

    Raises OSError for a file that cannot be read and ValueError, naming it, for a refused one.
    """
    parts = [ImagePart(path.read_bytes(), str(path)) for path in files]
    try:
        asyncio.run(_answer(config, parts, question, max_tokens))
    except RequestError as error:
        where = f"{error.param}: " if error.param else ""
        raise ValueError(f"{where}{error.message}") from error

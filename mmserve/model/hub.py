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

from mmserve.errors import first_line
from mmserve.model.fetch import ModelUnavailableError
from mmserve.model.shards import INDEX, SINGLE
from mmserve.model.supported import MODELS, native_json

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
    """Whether `model` is ours and no checkpoint: see `native_json`."""
    return model.endswith(".json") or native_json(model) is not None


def locate(model: str, progress: bool = True) -> Source:
    """The folder of `--model`, fetched into the hub's cache when it is a hub id.

    Raises `ModelUnavailableError`.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
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
    what = "/".join(filter(None, (repo, gguf))) + (f"@{revision}" if revision else "")
    with _bars(progress and sys.stderr.isatty()):
        try:
            files = _listing(repo, revision)
            if files is None:
                return Source(_cached(what, repo, revision, gguf or "config.json"), gguf)
            wanted = [gguf] if gguf else _wanted(repo, revision, files)
            if gguf and gguf not in files:
                raise ModelUnavailableError(f"{repo} has no file {gguf} on the hub")
            folder = huggingface_hub.snapshot_download(
                repo, revision=revision, allow_patterns=wanted
            )
        except ModelUnavailableError:
            raise
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
            said = f"{repo} has no revision {revision!r} on the hub"
            raise ModelUnavailableError(said) from error
        except Exception as error:  # the HTTP library's own faults, a full disk
            raise ModelUnavailableError(
                f"{what} could not be fetched: {first_line(error)}"
            ) from error
    return Source(Path(folder), gguf)


def _listing(repo: str, revision: str | None) -> list[str] | None:
    """A repository's files; None when the hub is out of reach, or HF_HUB_OFFLINE is set."""
    try:
        info = huggingface_hub.HfApi().model_info(repo, revision=revision)
    except errors.HfHubHTTPError as error:
        if error.response is not None and error.response.status_code >= 500:
            return None
        raise
    except Exception:  # no route, no name, a time-out: the HTTP library's classes, not the hub's
        return None
    return [file.rfilename for file in info.siblings or []]


def _cached(what: str, repo: str, revision: str | None, file: str) -> Path:
    """The snapshot's folder in the hub's cache; whether it is whole is checked with any folder."""
    found = huggingface_hub.try_to_load_from_cache(repo, file, revision=revision)
    if not isinstance(found, str):
        raise ModelUnavailableError(
            f"there is no folder {what!r} here, it is not in the hub's cache "
            f"({huggingface_hub.constants.HF_HUB_CACHE}), and the hub cannot be reached (or "
            "HF_HUB_OFFLINE is set)"
        )
    return Path(found).parent


def _wanted(repo: str, revision: str | None, files: list[str]) -> list[str]:
    """Names of the files to fetch."""
    index = None
    if INDEX in files:
        path = huggingface_hub.hf_hub_download(repo, INDEX, revision=revision)
        index = Path(path).read_text("utf-8")
    wanted = wanted_files(files, index)
    if not any(name.endswith(".safetensors") for name in wanted):
        other = sorted(f for f in files if f.endswith((".bin", ".gguf", ".pth", ".pt")))
        has = f" (it has {other[0]}; a .gguf is named as {repo}/FILE.gguf)" if other else ""
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

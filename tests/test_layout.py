"""The shape of the tree: who may import whom, what every module must have, and the links.

Reads source text only; imports nothing of the package.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mmserve"
LINKS = {"vision": "vision", "kernels": "kernels", "configs": "configs", "webui": "web/dist"}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

TYPES = {
    *("config", "errors", "faults", "request", "prompt", "tokenizer", "guarded", "hub_prompt"),
    *("tools", "metrics", "energy", "regimes", "held_image", "session", "kv_snapshot"),
}
# Page counts, no tensors.
BOOKS = {
    *("cache.page_pool", "cache.radix_cache", "cache.recency", "cache.vision_index"),
    "cache.radix_node",
    *("cache.layer_group", "cache.pool_sizes"),
}

# What a part may import of the package; a name covers its submodules. Each part may import itself.
ALLOWED = {
    "faults": set(),
    "config": {"faults"},
    "errors": set(),
    "flags": {"config"},
    "engine_flags": {"config", "flags"},
    "load_flags": {"config", "flags"},
    "regimes": set(),
    "request": set(),
    "streaming": {"request"},
    "keys": {"request"},
    "placed": {"request"},
    "places": set(),
    "sequence": {"keys", "placed", "regimes", "request", "streaming"},
    "session": set(),
    "tokenizer": set(),
    "metrics": set(),
    "energy": set(),
    "held_image": set(),
    "kv_snapshot": set(),
    "tools": set(),
    "prompt": {"errors", "request", "tokenizer", "tools"},
    "guarded": set(),
    "hub_prompt": {"errors", "request", "prompt", "guarded", "tools"},
    "kernels": set(),
    "vision": {"config", "errors", "kernels"},
    # Not a part of what is served: it stands above all that it trains, and what it trains by.
    "vision.train": TYPES | {"vision", "model", "engine", "whole_file", "train_drafter"},
    "cache": {"config", "request", "kernels"},
    "scheduler": {
        *(
            "config",
            "errors",
            "request",
            "placed",
            "sequence",
            "spec.draft",
            "spec.costs",
            "kv_snapshot",
        ),
        *BOOKS,
    },
    "model": {
        "config",
        "errors",
        "kernels",
        "vision",
        "cache.kv_pool",
        "cache.layer_group",
        "regimes",
    },
    "spec": {"config", "errors", "request", "whole_file"},
    "whole_file": set(),
    "kvfile": {"whole_file"},
    "tiers": {"whole_file", "kvfile", "faults"},
    "handover": {"config", "request", "tiers"},
    "engine": TYPES
    | {"keys", "placed", "sequence", "kernels", "vision", "cache", "scheduler", "model"}
    | {"kvfile", "tiers", "spec", "handover"},
    "stages": {"config", "errors", "flags", "engine_flags", "request", "sequence", "cache"}
    | {"scheduler", "model", "tiers", "handover", "engine"},
    "server": TYPES | {"whole_file"},
    "train_drafter": TYPES | {"vision", "model", "engine", "spec", "whole_file"},
    "train_command": {"config", "flags", "train_drafter"},
    "vision_command": {"config", "flags", "engine_flags", "vision.train"},
    "evaluation": {"config", "flags", "request", "prompt", "tokenizer", "model", "vision.train"}
    | {"train_drafter.questions"},
    "kv_command": {"flags", "kvfile", "whole_file"},
    "routing": set(),
    # A router and what starts it; nothing of an engine or of a server's parts beyond its words.
    "deploy": {"config", "flags", "errors", "routing", "server.wire", "server.bodies"},
    "serve_app": {"__main__", "deploy"},
    "plan": {"config", "flags", "routing", "bench", "model"},
    "chat": TYPES | {"engine"},
    "bench": TYPES
    | {"flags"}
    | {"sequence", "kernels", "vision", "cache", "scheduler", "model", "engine"}
    | {"train_drafter.pictures"},
    "__init__": set(),
}
ANYTHING = {"__main__"}  # the command line joins the ends

# Third-party packages (roots) that must not be known at all; a star forbids every one.
FORBIDDEN = {
    "config": {"*"},
    "errors": {"*"},
    "regimes": {"*"},
    "request": {"*"},
    "held_image": {"*"},
    "kv_snapshot": {"*"},
    "streaming": {"*"},
    "keys": {"*"},
    "placed": {"*"},
    "sequence": {"*"},
    "session": {"*"},
    "kvfile.header": {"*"},
    **dict.fromkeys(("tiers.books", "tiers.names", "tiers.cost"), {"*"}),
    "whole_file": {"*"},
    **dict.fromkeys(("prompt", "tokenizer", "metrics", "scheduler", *BOOKS), {"torch", "numpy"}),
    **dict.fromkeys(("guarded", "hub_prompt"), {"torch", "numpy", "transformers"}),
    "handover.choice": {"*"},
    "kernels": {"transformers", "timm", "open_clip", "starlette", "uvicorn"},
    "routing": {"torch", "transformers"},
    **dict.fromkeys(("plan.hardware", "plan.traffic", "plan.command"), {"*"}),
    "plan.simulate": {"torch", "transformers"},
    "server": {"torch", "transformers", "numpy", "PIL"},
}


@cache
def sources() -> dict[str, Path]:
    """Every module of the package by its name without `mmserve.`; links are followed once."""
    found = {}
    folders = [PACKAGE, *(PACKAGE / name for name in LINKS if name != "webui")]
    for folder in folders:
        for path in folder.rglob("*.py"):
            parts = path.relative_to(PACKAGE).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" and parts[:-1] else parts)
            found[name] = path
    return found


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(sources()[name].read_text("utf-8"))


def covers(pattern: str, name: str) -> bool:
    return name == pattern or name.startswith(pattern + ".")


def imports(name: str) -> Iterator[str]:
    """Full dotted names, one for each imported name where it is a module of ours."""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            assert node.module is not None
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            ours = [i for i in inner if i.removeprefix("mmserve.") in sources()]
            yield from ours or [node.module]


def own_imports(name: str) -> set[str]:
    """Names of our modules without `mmserve.`; the bare package (its version) is everybody's."""
    return {i.removeprefix("mmserve.") for i in imports(name) if i.startswith("mmserve.")}


def third_party(name: str) -> set[str]:
    roots = {i.split(".")[0] for i in imports(name)}
    return roots - set(sys.stdlib_module_names) - {"mmserve"}


def functions(name: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree(name)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def test_the_walk_sees_the_whole_package() -> None:
    names = set(sources())
    assert {"config", "cache.page_pool", "kernels.reference", "vision.model", "server"} <= names
    assert own_imports("engine.engine") >= {"scheduler.batch", "engine.live"}
    assert "torch" in third_party("kernels.reference")


def part_of(name: str) -> str:
    """The innermost part of ALLOWED that a module belongs to."""
    parts = [part for part in ALLOWED if covers(part, name)]
    return max(parts, key=len, default=name.split(".")[0])


def may_import(part: str, name: str) -> bool:
    """A part that lies in another is not allowed with it."""
    allowed, inner = ALLOWED[part] | {part}, part_of(name)
    if "." in inner and not any(covers(inner, a) for a in allowed):
        return False
    return any(covers(a, name) for a in allowed)


def test_a_part_within_another_is_allowed_by_its_own_name_alone() -> None:
    assert part_of("vision.train.stage") == "vision.train" and part_of("vision.model") == "vision"
    assert not may_import("vision", "vision.train.stage")
    assert may_import("vision.train", "vision.model")
    assert not may_import("engine", "vision.train.stage")


@pytest.mark.parametrize("name", sorted(sources()))
def test_a_module_imports_only_what_lies_below_it(name: str) -> None:
    part = part_of(name)
    if part in ANYTHING:
        return
    assert part in ALLOWED, f"{part} is new: say in ALLOWED what it may import"
    too_high = {i for i in own_imports(name) if not may_import(part, i)}
    assert not too_high, f"mmserve.{name} may not import {sorted(too_high)}"


@pytest.mark.parametrize("name", sorted(sources()))
def test_a_module_knows_no_package_it_must_not_know(name: str) -> None:
    for pattern, forbidden in FORBIDDEN.items():
        if covers(pattern, name):
            known = third_party(name)
            bad = known if "*" in forbidden else known & forbidden
            assert not bad, f"mmserve.{name} may not import {sorted(bad)}"


def test_the_books_of_pages_import_only_each_other() -> None:
    for name in BOOKS:
        assert own_imports(name) <= BOOKS
        assert not third_party(name)


@pytest.mark.parametrize("name", sorted(sources()))
def test_a_module_says_what_it_owns(name: str) -> None:
    path = sources()[name]
    if path.name == "__init__.py" and not path.read_text("utf-8").strip():
        return
    assert ast.get_docstring(tree(name)), f"{path} has no docstring"


@pytest.mark.parametrize("name", sorted(sources()))
def test_files_and_functions_stay_short(name: str) -> None:
    lines = len(sources()[name].read_text("utf-8").splitlines())
    assert lines <= MAX_FILE_LINES, f"{name} has {lines} lines"
    long = {f: n for f, n in functions(name) if n > MAX_FUNCTION_LINES}
    assert not long, f"functions of {name} over {MAX_FUNCTION_LINES} lines: {long}"


@pytest.mark.parametrize("link", LINKS)
def test_links_lead_to_the_top_level_folders(link: str) -> None:
    path = PACKAGE / link
    assert path.is_symlink()
    assert not path.readlink().is_absolute()
    assert path.resolve() == ROOT / LINKS[link]
    assert path.is_dir()


def test_every_path_the_documents_name_exists() -> None:
    """In the traced request and elsewhere, a file is named from the root or from `mmserve/`."""
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = document.read_text("utf-8")
        named = re.findall(r"`([\w./-]+/[\w./-]+\.\w+)`|\]\((?!http|#)([^)#]+)\)", text)
        assert named or document.name != "README.md"
        for path in (code or link for code, link in named):
            places = (ROOT / path, PACKAGE / path, document.parent / path)
            assert any(p.exists() for p in places), f"{document.name} names {path}"


def test_linked_code_folders_are_no_packages_of_their_own() -> None:
    """A top-level package `kernels` would hide Hugging Face's, which transformers imports."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "vision" / "__init__.py").exists()

"""What `pip install .` brings: a wheel with the page, the weights and nothing of the workshop.

Builds from a copy of the tree, because setuptools leaves a `build` folder in its source.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
# Compiled files stay in the copy, so that their absence from the wheel means something.
LEFT_OUT = shutil.ignore_patterns(".*", "node_modules", "build", "*.egg-info")
PROBE = """
import importlib.resources as resources, pathlib, sys
import mmserve
from mmserve.model.spec import load_spec
from mmserve.kernels import reference
from mmserve.server.page import Page
here = pathlib.Path(sys.argv[1])
assert pathlib.Path(mmserve.__file__).is_relative_to(here), mmserve.__file__
assert "<script" in (resources.files("mmserve") / "webui" / "index.html").read_text("utf-8")
spec = load_spec("smolvision-135m")
assert all(file.is_relative_to(here) for file in spec.vision_files)
print(spec.name)
"""


def pip(*args: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *args]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=LEFT_OUT)
    pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(source))
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def tracked(folder: str) -> set[str]:
    """Files below a folder of the tree, as paths from the tree's root."""
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.parametrize(
    ("folder", "prefix"),
    [
        ("mmserve", ""),
        ("vision", "mmserve/"),
        ("kernels", "mmserve/"),
        ("configs", "mmserve/"),
        ("web/dist", "mmserve/webui"),
    ],
)
def test_the_wheel_holds_every_file_of(folder: str, prefix: str, names: set[str]) -> None:
    files = tracked(folder)
    assert files
    if folder == "web/dist":
        files = {file.replace(folder, prefix, 1) for file in files}
    else:
        files = {prefix + file for file in files}
    assert not files - names


def test_the_wheel_holds_weights_page_and_licence(names: set[str]) -> None:
    assert {"mmserve/webui/index.html", "mmserve/webui/kv.html"} <= names
    assert "mmserve/configs/models/smolvision-135m.json" in names
    assert "mmserve/configs/models/smolvision-135m/vision.safetensors" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("licenses/THIRD_PARTY_NOTICES.md") for name in names)


def test_the_wheel_holds_nothing_of_the_workshop(names: set[str]) -> None:
    roots = {name.split("/")[0] for name in names}
    assert {root for root in roots if not root.endswith(".dist-info")} == {"mmserve"}
    unwanted = ("__pycache__", "node_modules", "tests", "src")
    assert not {name for name in names if set(name.split("/")) & set(unwanted)}


def test_the_command_is_declared(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (entry,) = [n for n in archive.namelist() if n.endswith("entry_points.txt")]
        assert "mmserve = mmserve.__main__:main" in archive.read(entry).decode()


def test_an_installed_wheel_finds_its_data_without_the_tree(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip("install", "--no-deps", "--target", str(target), str(wheel))
    result = subprocess.run(
        [sys.executable, "-c", PROBE, str(target)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(target), "PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "smolvision-135m"

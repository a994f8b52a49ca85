"""The list of models: what the tests build, what the documents say, what the command prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mmserve.model.supported import (
    CHECKS,
    IMAGE_FAMILIES,
    TEXT_FAMILIES,
    listing,
    native_models,
    table,
)
from tests.model import families

DOCUMENT = (Path(__file__).parents[2] / "docs" / "models.md").read_text("utf-8")
ALL = (*IMAGE_FAMILIES, *TEXT_FAMILIES)


def test_every_family_that_is_tested_is_listed_and_no_other() -> None:
    assert {t for f in IMAGE_FAMILIES for t in f.tests} == set(families.VISION)
    assert {t for f in TEXT_FAMILIES for t in f.tests} == set(families.TEXT)


@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_a_family_s_architecture_is_its_checkpoints_own(family: object, tmp_path: Path) -> None:
    (found,) = [f for f in ALL if f is family]
    for name in found.tests:
        config = json.loads((families.build(name, tmp_path) / "config.json").read_text())
        assert config["architectures"] == [found.architecture]


def test_the_document_has_the_same_tables() -> None:
    assert table(IMAGE_FAMILIES) in DOCUMENT
    assert table(TEXT_FAMILIES) in DOCUMENT
    for name, text in CHECKS.items():
        assert f"- **{name}**: {text}." in DOCUMENT


def test_every_family_with_images_says_its_modes_and_no_other() -> None:
    assert all(family.modes for family in IMAGE_FAMILIES)
    assert not any(family.modes for family in TEXT_FAMILIES)


def test_every_check_that_is_claimed_is_explained() -> None:
    assert {check for family in ALL for check in family.checked} == set(CHECKS)


def test_the_listing_names_all_of_them() -> None:
    text = listing()
    for family in ALL:
        assert family.architecture in text
        assert family.example in text
    assert "smolvision-135m" in native_models()
    assert "smolvision-135m" in text
    assert max(map(len, text.splitlines())) <= 136


def test_the_command_prints_the_listing_without_loading_pytorch() -> None:
    probe = "import sys; from mmserve.__main__ import main; main(['models']); "
    command = [sys.executable, "-c", probe + "print('torch' in sys.modules)"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.stdout == f"{listing()}\nFalse\n"

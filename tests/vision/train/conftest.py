"""One small archive for all makers' tests."""

from __future__ import annotations

import pytest

from mmserve.vision.train.assets import Assets
from tests.vision.train.archive import small_archive


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    return Assets(small_archive(tmp_path_factory.mktemp("assets") / "assets.zip"))

"""The checks on the served default model, shortened where they are long."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))

from tests.checks import company, endless, hit_equals_miss, long_session, sdk, vqa
from tests.checks.served import Served, serving

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as running:
        yield running


def test_the_openai_sdk_talks_about_a_picture(served: Served) -> None:
    sdk.check(served)


def test_easy_vqa_is_answered_as_well_as_the_model_card_says(served: Served) -> None:
    assert vqa.accuracy(served, sample=200) >= 0.99


def test_a_known_picture_gives_a_cold_servers_answer_anywhere() -> None:
    hit_equals_miss.check()


def test_a_session_goes_on_and_its_early_image_is_answered_as_at_first() -> None:
    endless.check(40, "tiny")


def test_company_aborts_and_many_pictures_change_nothing() -> None:
    company.check(pictures=400)


def test_a_long_conversation_over_http_computes_a_turn_no_more_than_at_first() -> None:
    computed = [cost.computed for cost in long_session.check(120, 600)]
    assert max(computed[60:]) <= max(computed[:60])

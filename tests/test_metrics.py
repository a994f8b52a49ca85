"""Metrics: the exact names that dashboards ask for, and values that reach the text."""

from __future__ import annotations

import pytest
from prometheus_client import metrics as prometheus
from prometheus_client.parser import text_string_to_metric_families

from mmserve.metrics import POOLS, Metrics


def shown(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.mark.parametrize(
    "name",
    [
        "num_preemptions",
        "prompt_tokens",
        "generation_tokens",
        "prefill_seconds",
        "decode_seconds",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "mm_cache_queries",
        "mm_cache_hits",
        "image_decodes",
        "vision_encoder_runs",
        "vision_kv_writes",
    ],
)
def test_a_counter_is_shown_with_total_and_starts_at_zero(name: str) -> None:
    metrics = Metrics()
    assert shown(metrics)[f"mmserve:{name}_total", ()] == 0
    getattr(metrics, name).inc(3)
    assert shown(metrics)[f"mmserve:{name}_total", ()] == 3


@pytest.mark.parametrize("name", ["num_requests_running", "num_requests_waiting"])
def test_a_gauge_is_shown_under_its_name(name: str) -> None:
    metrics = Metrics()
    getattr(metrics, name).set(5)
    assert shown(metrics)[f"mmserve:{name}", ()] == 5


@pytest.mark.parametrize(
    "name",
    [
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
    ],
)
def test_a_latency_counts_and_sums(name: str) -> None:
    metrics = Metrics()
    getattr(metrics, name).observe(0.04)
    getattr(metrics, name).observe(1000)
    values = shown(metrics)
    assert values[f"mmserve:{name}_count", ()] == 2
    assert values[f"mmserve:{name}_sum", ()] == pytest.approx(1000.04)
    assert values[f"mmserve:{name}_bucket", (("le", "0.05"),)] == 1


def test_pages_and_usage_are_shown_by_pool() -> None:
    metrics = Metrics()
    metrics.set_pages("vision", active=3, cached=5, free=4)
    values = shown(metrics)
    assert values["mmserve:kv_cache_usage_perc", (("pool", "vision"),)] == 0.25
    assert values["mmserve:kv_cache_usage_perc", (("pool", "text"),)] == 0
    pages = {
        state: values["mmserve:pages", (("pool", "vision"), ("state", state))]
        for state in ("active", "cached", "free")
    }
    assert pages == {"active": 3, "cached": 5, "free": 4}


def test_two_engines_in_one_process_count_apart() -> None:
    first, second = Metrics(), Metrics()
    first.image_decodes.inc()
    assert shown(second)["mmserve:image_decodes_total", ()] == 0


def test_the_updates_of_a_step_look_up_no_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()

    def looked_up(*_: object, **__: object) -> None:
        raise AssertionError("a lock and a dictionary in every step")

    monkeypatch.setattr(prometheus.MetricWrapperBase, "labels", looked_up)
    metrics.num_requests_running.set(8)
    for pool in POOLS:
        metrics.set_pages(pool, active=1, cached=2, free=3)
    metrics.inter_token_latency_seconds.observe(0.02)
    for joules in metrics.energy_joules.values():
        joules.inc(2)


def test_what_is_refused_is_shown_by_its_reason() -> None:
    metrics = Metrics()
    metrics.refused("damaged")
    metrics.file_refused("other_model")
    metrics.request_refused("queue_full")
    found = shown(metrics)
    name = "mmserve:kv_refusals_total"
    assert found[name, (("reason", "damaged"), ("source", "tier"))] == 1
    assert found[name, (("reason", "other_model"), ("source", "file"))] == 1
    assert found["mmserve:request_refusals_total", (("reason", "queue_full"),)] == 1


def test_a_tier_is_shown_by_its_name() -> None:
    metrics = Metrics()
    metrics.show_tier("disk", lambda: (3, 3000), 400)
    metrics.moved("disk", "up", 1000)
    found = shown(metrics)
    assert found["mmserve:tier_objects", (("tier", "disk"),)] == 3
    assert found["mmserve:tier_bytes", (("tier", "disk"),)] == 3000
    assert found["mmserve:tier_pages", (("tier", "disk"),)] == 7
    moved = (("direction", "up"), ("tier", "disk"))
    assert found["mmserve:tier_moved_bytes_total", moved] == 1000


def test_values_are_those_of_the_text() -> None:
    metrics = Metrics()
    metrics.generation_tokens.inc(3)
    metrics.time_to_first_token_seconds.observe(0.2)
    metrics.set_pages("text", active=1, cached=2, free=3)
    values = metrics.values()
    assert values["mmserve:generation_tokens_total"] == 3
    assert values['mmserve:time_to_first_token_seconds_bucket{le="0.25"}'] == 1
    assert values['mmserve:pages{pool="text",state="cached"}'] == 2
    named = {(name, dict(labels)["le"]) for name, labels in shown(metrics) if "le" in dict(labels)}
    assert len(values) == len([k for k in shown(metrics) if not k[0].endswith("_created")])
    assert all(f'{name}{{le="{edge}"}}' in values for name, edge in named)

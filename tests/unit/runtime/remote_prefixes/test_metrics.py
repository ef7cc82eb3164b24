"""The exported metrics of a prefix server are its counters, each counted once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY

from sglang_kvspec.runtime.remote_prefixes import RemoteMetrics
from sglang_kvspec.runtime.remote_prefixes.metrics import PERIOD_S


class Clock:
    now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> Iterator[RemoteMetrics]:
    before = set(REGISTRY._collector_to_names)
    yield RemoteMetrics("toy", clock)
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def report(published: int = 7, fetched: int = 100) -> dict[str, object]:
    counters = {
        **{"lookups": 5, "hits": 3, "expired": 1, "unasked": 2},
        **{"pages_found": 9, "pages_fetched": 8, "pages_published": published},
        **{"pages_unkept": 0, "pages_dropped": 4},
        **{"early": 2, "returned": 1, "drafts_on_anchors": 40},
    }
    return {
        "is_live": True,
        "counters": counters,
        "fetched_bytes": {"anchor": fetched, "residual": 2 * fetched},
        "published_bytes": 50,
        "dropped_frames": {"checksum": 6},
    }


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(
        f"sglang:kvspec_prefix_server_{name}", {"model_name": "toy"} | labels
    )


def test_totals_are_added_once_and_not_all_the_time(metrics: RemoteMetrics, clock: Clock) -> None:
    metrics.publish(report)
    assert value("lookups_total", outcome="hits") == 3
    assert value("lookups_total", outcome="asked") == 5
    assert value("lookups_total", outcome="early") == 2
    assert value("lookups_total", outcome="returned") == 1
    assert value("drafts_total", read="anchors") == 40
    assert value("pages_total", outcome="published") == 7
    assert value("pages_total", outcome="dropped") == 4
    assert value("bytes_total", direction="fetched") == 300
    assert value("dropped_frames_total", reason="checksum") == 6
    assert value("is_live") == 1
    metrics.publish(lambda: pytest.fail("asked again too soon"))
    clock.now_s += PERIOD_S
    metrics.publish(lambda: report(published=9))
    assert value("pages_total", outcome="published") == 9
    assert value("lookups_total", outcome="hits") == 3


def test_a_link_that_has_failed_takes_no_total_back(metrics: RemoteMetrics, clock: Clock) -> None:
    metrics.publish(report)
    clock.now_s += PERIOD_S
    failed = {"is_live": False, "counters": report()["counters"]}
    metrics.publish(lambda: failed)
    assert value("is_live") == 0
    assert value("bytes_total", direction="fetched") == 300
    clock.now_s += PERIOD_S
    metrics.publish(lambda: report(fetched=110))
    assert value("bytes_total", direction="fetched") == 330

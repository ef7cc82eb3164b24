"""Prometheus counts the traffic of links once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang_kvspec.runtime.disaggregation.metrics import PERIOD_S, TransferMetrics
from sglang_kvspec.transport import Stream
from sglang_kvspec.transport.counters import LinkCounters
from sglang_kvspec.transport.wire import Drop


class Clock:
    now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


def value(name: str, **labels: str) -> float:
    from prometheus_client import REGISTRY

    found = REGISTRY.get_sample_value(f"sglang:kvspec_{name}", {"model_name": "m", **labels})
    return 0.0 if found is None else found


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def metrics(clock: Clock) -> Iterator[TransferMetrics]:
    """Metrics that leave the default registry after the tests."""
    from prometheus_client import REGISTRY

    before = set(REGISTRY._collector_to_names)
    yield TransferMetrics("m", clock)
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def test_totals_of_all_links_are_counted_once(metrics: TransferMetrics, clock: Clock) -> None:
    links = [LinkCounters(since_s=0.0), LinkCounters(since_s=0.0)]
    for link in links:
        link.streams[Stream.ANCHOR].payload_bytes = 100
        link.streams[Stream.RESIDUAL].resent_bytes = 7
        link.dropped[Drop.MALFORMED] = 2
        link.to_anchors.observe(0.5)
        link.completed, link.failed, link.link_busy_s = 3, 1, 5.0
    for _ in range(2):
        clock.now_s += PERIOD_S
        metrics.publish(lambda: links, drafts_on_anchors=4)
    assert value("transfer_bytes_total", stream="anchor") == 200
    assert value("transfer_resent_bytes_total", stream="residual") == 14
    assert value("transfer_dropped_frames_total", reason="malformed") == 4
    assert value("transfer_requests_total", outcome="completed") == 6
    assert value("transfer_requests_total", outcome="failed") == 2
    assert value("transfer_arrivals_total", stream="anchor") == 2
    assert value("transfer_arrival_seconds_total", stream="anchor") == 1.0
    assert value("drafts_on_anchors_total") == 4
    assert value("transfer_link_use") == pytest.approx(5.0 / clock.now_s)
    # A closed link removes its counters, and the other link is still counted.
    links.pop()
    links[0].streams[Stream.ANCHOR].payload_bytes = 150
    clock.now_s += PERIOD_S
    metrics.publish(lambda: links, drafts_on_anchors=4)
    links[0].streams[Stream.ANCHOR].payload_bytes = 180
    clock.now_s += PERIOD_S
    metrics.publish(lambda: links, drafts_on_anchors=5)
    assert value("transfer_bytes_total", stream="anchor") == 230
    assert value("drafts_on_anchors_total") == 5


def test_not_in_every_iteration(metrics: TransferMetrics, clock: Clock) -> None:
    before = value("drafts_on_anchors_total")
    metrics.publish(list, drafts_on_anchors=100)
    assert value("drafts_on_anchors_total") == before

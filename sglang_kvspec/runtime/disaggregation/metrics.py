"""Counters of the links between prefill and decode servers, for Prometheus."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from sglang_kvspec.transport.counters import LinkCounters

# Least time between two exports: links have many counters, and iterations are short.
PERIOD_S = 0.5


class TransferMetrics:
    """Exporter of the totals of all links of a server to prometheus_client's default registry, like
    runtime.metrics.MetricsExporter."""

    def __init__(self, model_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: clock of the links."""
        # Import late: prometheus_client fixes its storage when it is first imported.
        from prometheus_client import Counter as PromCounter
        from prometheus_client import Gauge

        def counter(name: str, text: str, *labels: str) -> PromCounter:
            return PromCounter(f"sglang:kvspec_transfer_{name}", text, ["model_name", *labels])

        self._model_name, self._clock = model_name, clock
        self._due_s = clock()
        self._counters = {
            "bytes": counter("bytes", "KV bytes transferred", "stream"),
            "resent": counter("resent_bytes", "KV bytes sent again", "stream"),
            "busy": counter("busy_seconds", "Seconds with bytes in flight", "stream"),
            "requests": counter("requests", "Ended KV transfers", "outcome"),
            "dropped": counter("dropped_frames", "Received frames that were dropped", "reason"),
            "arrived": counter(
                "arrivals", "KV transfers whose stream arrived completely", "stream"
            ),
            "waited": counter(
                "arrival_seconds", "Seconds from request to complete arrival of a stream", "stream"
            ),
        }
        self._drafts = PromCounter(
            "sglang:kvspec_drafts_on_anchors",
            "Draft tokens made while residuals were in transfer",
            ["model_name"],
        )
        self._link_use = Gauge(
            "sglang:kvspec_transfer_link_use",
            "Share of the links' lifetime with bytes in flight",
            ["model_name"],
            multiprocess_mode="mostrecent",
        )
        self._last: Counter[tuple[str, str]] = Counter()
        self._last_drafts = 0

    def publish(
        self, counters_of_links: Callable[[], list[LinkCounters]], drafts_on_anchors: int
    ) -> None:
        """Export what happened since the last export, at most once in PERIOD_S. counters_of_links:
        called only then, because it copies the counters."""
        now_s = self._clock()
        if now_s < self._due_s:
            return
        self._due_s = now_s + PERIOD_S
        links = counters_of_links()
        now: Counter[tuple[str, str]] = Counter()
        for link in links:
            now.update(_totals(link))
        for (name, label), value in now.items():
            # Totals of a closed link are gone, so the sum may fall.
            risen = max(0.0, value - self._last[name, label])
            self._counters[name].labels(self._model_name, label).inc(risen)
        self._last = now
        if links:
            use = sum(link.link_use(now_s) for link in links) / len(links)
            self._link_use.labels(self._model_name).set(use)
        self._drafts.labels(self._model_name).inc(drafts_on_anchors - self._last_drafts)
        self._last_drafts = drafts_on_anchors


def _totals(link: LinkCounters) -> dict[tuple[str, str], float]:
    totals: dict[tuple[str, str], float] = {
        ("requests", "completed"): link.completed,
        ("requests", "failed"): link.failed,
    }
    for stream, counted in link.streams.items():
        label = stream.name.lower()
        totals["bytes", label] = counted.payload_bytes
        totals["resent", label] = counted.resent_bytes
        totals["busy", label] = counted.busy_s
    for label, durations in (("anchor", link.to_anchors), ("residual", link.to_residuals)):
        totals["arrived", label] = durations.count
        totals["waited", label] = durations.total_s
    for drop, number in link.dropped.items():
        totals["dropped", drop.name.lower()] = number
    return totals

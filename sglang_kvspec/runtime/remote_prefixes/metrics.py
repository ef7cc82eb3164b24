"""Counters of lookups at a prefix server, and of publishing to it, for Prometheus."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

# Least time between two exports: the link has many counters, and iterations are short.
PERIOD_S = 0.5


class RemoteMetrics:
    """Exporter of totals to prometheus_client's default registry, like
    runtime.metrics.MetricsExporter."""

    def __init__(self, model_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        # Import late: prometheus_client fixes its storage when it is first imported.
        from prometheus_client import Counter as PromCounter
        from prometheus_client import Gauge

        def counter(name: str, text: str, label: str) -> PromCounter:
            return PromCounter(f"sglang:kvspec_prefix_server_{name}", text, ["model_name", label])

        self._model_name, self._clock = model_name, clock
        self._due_s = clock()
        self._counters = {
            "lookups": counter("lookups", "Prompts by outcome of their lookup", "outcome"),
            "pages": counter("pages", "Pages by outcome of their lookup or upload", "outcome"),
            "bytes": counter("bytes", "Record bytes transferred", "direction"),
            "drafts": counter("drafts", "Draft tokens made while records were in transfer", "read"),
            "dropped": counter("dropped_frames", "Received frames that were dropped", "reason"),
        }
        self._is_live = Gauge(
            "sglang:kvspec_prefix_server_is_live",
            "1 while the link to the prefix server is live, else 0",
            ["model_name"],
            multiprocess_mode="mostrecent",
        )
        self._last: Counter[tuple[str, str]] = Counter()

    def publish(self, make_report: Callable[[], dict[str, Any]]) -> None:
        """Export what happened since the last export, at most once in PERIOD_S. make_report:
        RemotePrefixes.report, called only then."""
        now_s = self._clock()
        if now_s < self._due_s:
            return
        self._due_s = now_s + PERIOD_S
        report = make_report()
        now = _totals(report)
        for (name, label), value in now.items():
            risen = max(0, value - self._last[name, label])
            self._counters[name].labels(self._model_name, label).inc(risen)
        self._last |= now
        self._is_live.labels(self._model_name).set(report["is_live"])


def _totals(report: dict[str, Any]) -> Counter[tuple[str, str]]:
    counters = report["counters"]
    totals: Counter[tuple[str, str]] = Counter()
    for outcome in ("hits", "expired", "unasked", "early", "returned"):
        totals["lookups", outcome] = counters[outcome]
    totals["lookups", "asked"] = counters["lookups"]
    totals["drafts", "anchors"] = counters["drafts_on_anchors"]
    for outcome in ("found", "fetched", "published", "unkept", "dropped"):
        totals["pages", outcome] = counters[f"pages_{outcome}"]
    # The report of a failed link has no counters.
    if "fetched_bytes" in report:
        totals["bytes", "fetched"] = sum(report["fetched_bytes"].values())
        totals["bytes", "published"] = report["published_bytes"]
        for reason, number in report["dropped_frames"].items():
            totals["dropped", reason] = number
    return totals

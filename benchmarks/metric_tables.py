"""Tables of the Prometheus metrics, drawn from what a server registers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.metrics import MetricWrapperBase

from sglang_kvspec.runtime.disaggregation.metrics import TransferMetrics
from sglang_kvspec.runtime.metrics import MetricsExporter
from sglang_kvspec.runtime.remote_prefixes.metrics import RemoteMetrics

EXPORTERS = {
    "metrics_server": MetricsExporter,
    "metrics_transfer": TransferMetrics,
    "metrics_prefix_server": RemoteMetrics,
}
HEADER = "| metric | type | labels besides `model_name` | meaning |\n|---|---|---|---|"


def metric_tables() -> dict[str, str]:
    """Return each table by its name."""
    return {name: _table_of(exporter) for name, exporter in EXPORTERS.items()}


def _table_of(exporter_type: Any) -> str:
    metrics = list(_metrics_of(exporter_type("model")))
    # A process can register a name only once, and another exporter may use the same name.
    for metric in metrics:
        REGISTRY.unregister(metric)
    return "\n".join([HEADER, *map(_row, metrics)])


def _metrics_of(exporter: Any) -> Iterator[MetricWrapperBase]:
    for value in vars(exporter).values():
        found = value.values() if isinstance(value, dict) else [value]
        yield from (metric for metric in found if isinstance(metric, MetricWrapperBase))


def _row(metric: MetricWrapperBase) -> str:
    (family,) = metric.describe()
    name = f"{family.name}_total" if family.type == "counter" else family.name
    labels = ", ".join(f"`{label}`" for label in metric._labelnames if label != "model_name")
    return f"| `{name}` | {family.type} | {labels} | {family.documentation} |"

"""Queries of the example dashboard, and the metrics that queries and alerts name."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

MONITORING = Path(__file__).resolve().parents[2] / "examples" / "monitoring"
# Prometheus stores a colon or an underscore, depending on the scraped format. Queries match both.
_METRIC = re.compile(r"sglang\.kvspec_(\w+)")


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel. row: the part of the dashboard that the panel is in."""

    row: str
    panel: str
    text: str


def dashboard_queries() -> list[Query]:
    """Return all queries of the dashboard, with its variables filled in."""
    dashboard = json.loads((MONITORING / "grafana.json").read_text(encoding="utf-8"))
    found, row = [], ""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
        for target in panel.get("targets", []):
            text = target["expr"].replace("$model", ".*").replace("$__rate_interval", "1m")
            found.append(Query(row, panel["title"], text))
    return found


def metric_names(text: str) -> list[str]:
    """Return the metrics that a query or a file of alerts names, as a server registers them."""
    return [f"sglang:kvspec_{name}" for name in _METRIC.findall(text)]

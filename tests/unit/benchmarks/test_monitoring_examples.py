"""The dashboard and the alerts ask for metrics that a server registers, by labels they have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import metric_tables
import pytest

MONITORING = Path(__file__).resolve().parents[3] / "examples" / "monitoring"
# Prometheus stores a colon or an underscore, by the format that it scrapes: queries match both.
_METRIC = re.compile(r"sglang\.kvspec_(\w+)")
_GROUPED = re.compile(r"by \((?P<labels>[\w, ]+)\) \((?P<query>.*?\))")


@pytest.fixture(scope="module")
def labels_of():
    """The labels of each series that a server can have."""
    found = {}
    for table in metric_tables.metric_tables().values():
        for line in table.splitlines()[2:]:
            name, kind, labels, _ = (cell.strip() for cell in line.strip("| ").split(" | ", 3))
            names = set(re.findall(r"`(\w+)`", labels)) | {"model_name"}
            name = name.strip("`")
            found[f"{name}_bucket" if kind == "histogram" else name] = names | (
                {"le"} if kind == "histogram" else set()
            )
    return found


def queries():
    dashboard = json.loads((MONITORING / "grafana.json").read_text(encoding="utf-8"))
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


@pytest.mark.parametrize("query", queries())
def test_queries_name_metrics_and_labels_that_exist(query, labels_of):
    names = [f"sglang:kvspec_{name}" for name in _METRIC.findall(query)]
    assert names
    assert set(names) <= set(labels_of)
    for group in _GROUPED.finditer(query):
        labels = {label.strip() for label in group["labels"].split(",")}
        assert labels <= labels_of["sglang:kvspec_" + _METRIC.search(group["query"])[1]]


def test_alerts_name_metrics_that_exist(labels_of):
    text = (MONITORING / "alerts.yml").read_text(encoding="utf-8")
    names = [f"sglang:kvspec_{name}" for name in _METRIC.findall(text)]
    assert names
    assert set(names) <= set(labels_of)

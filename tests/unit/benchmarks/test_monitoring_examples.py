"""The dashboard and the alerts ask for metrics that a server registers, by labels they have."""

from __future__ import annotations

import re

import metric_tables
import pytest

from kvspec_testkit.monitoring import MONITORING, dashboard_queries, metric_names

_GROUPED = re.compile(r"by \((?P<labels>[\w, ]+)\) \((?P<query>.*?\))")


@pytest.fixture(scope="module")
def labels_of():
    """Return the labels of each series that a server can have."""
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


@pytest.mark.parametrize("query", [query.text for query in dashboard_queries()])
def test_queries_name_metrics_and_labels_that_exist(query, labels_of):
    names = metric_names(query)
    assert names
    assert set(names) <= set(labels_of)
    for group in _GROUPED.finditer(query):
        labels = {label.strip() for label in group["labels"].split(",")}
        assert labels <= labels_of[metric_names(group["query"])[0]]


def test_alerts_name_metrics_that_exist(labels_of):
    text = (MONITORING / "alerts.yml").read_text(encoding="utf-8")
    names = metric_names(text)
    assert names
    assert set(names) <= set(labels_of)

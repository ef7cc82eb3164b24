"""Pages have the tables that their sources give, and no page names a table that does not exist."""

from __future__ import annotations

import doc_tables
import metric_tables
import pytest

TABLES = doc_tables.all_tables()


@pytest.mark.parametrize("page", doc_tables.pages(), ids=lambda page: page.name)
def test_pages_are_drawn_from_their_sources(page):
    text = page.read_text(encoding="utf-8")
    assert text == doc_tables.filled(text, TABLES), "run benchmarks/doc_tables.py"


def test_each_table_stands_on_a_page():
    text = "\n".join(page.read_text(encoding="utf-8") for page in doc_tables.pages())
    assert [name for name in TABLES if f"<!-- {name}:begin -->" not in text] == []


def test_a_mark_without_a_table_is_refused():
    with pytest.raises(SystemExit, match=r"other:begin --> marks an unknown table: .* known"):
        doc_tables.filled("<!-- other:begin -->\n<!-- other:end -->", {"known": ""})


def test_text_between_the_marks_is_replaced():
    text = "before\n<!-- one:begin -->\nold\n<!-- one:end -->\nafter\n"
    assert doc_tables.filled(text, {"one": "new"}) == text.replace("old", "new")


def test_metrics_have_their_labels_and_stay_unregistered():
    for _ in range(2):
        text = metric_tables.metric_tables()["metrics_server"]
    assert (
        "| `sglang:kvspec_prefix_hit_tokens_total` | counter | `tier` | "
        "Prompt tokens found in the prefix cache |"
    ) in text

"""Figures of packed residuals, put together from parts."""

from __future__ import annotations

import pytest
from acceptance.parts import answers_figures
from collect_exact_residual import RATE, fetch_figures, hosted_figures, kernel_figures


def row(name, value, spread=None):
    return {"name": name, "value": value, "unit": "x", "spread": spread, "baseline": None}


def values(figures):
    return {figure.name: figure.value for figure in figures}


def test_kernels_are_named_as_the_goals_are():
    rows = [row("exactres.pack.tbps", 0.7), row("exactres.unpack.tbps", 0.4), row("other", 1)]
    assert values(kernel_figures(rows)) == {
        "exactres.encode.tbps": 0.7,
        "exactres.restore.tbps": 0.4,
    }


def test_packed_fetches_are_compared_with_raw_ones():
    rows = [row("fetch.draft_step_ms", 8.0, 0.1)]
    for number, form in enumerate(("", ".packed"), 1):
        for way in ("", ".by_layer"):
            rows += [
                row(f"fetch{form}{way}.alone_pages_per_s", 1000.0 * number, 10.0 * number),
                row(f"fetch{form}{way}.pages_per_s", 600.0 * number**2, 6.0 * number**2),
                row(f"fetch{form}{way}.draft_slowdown", 1.0 + 0.1 * number),
            ]
    figures = fetch_figures(rows)
    for way in ("by_page", "by_layer"):
        found = values(figures)
        assert found[f"exactres.fetch.{way}.alone.vs_raw"] == 2
        assert found[f"exactres.fetch.{way}.drafting.vs_raw"] == 4
        assert found[f"exactres.fetch.{way}.draft_slowdown"] == 1.2
    # One part in a hundred of either rate.
    assert figures[0].spread == pytest.approx(0.04)
    assert figures[0].baseline == 1000
    assert fetch_figures([]) == []


def test_a_server_with_packed_residuals_is_compared_with_a_raw_one():
    servers = [
        [row("serve.32b.32k.bs11.exact.accepted", 15.0), row("serve.32b.32k.bs11" + RATE, *rate)]
        for rate in ((200.0, 20.0), (300.0, 15.0))
    ]
    ratio, raw, packed = hosted_figures("32b.32k", *servers)
    assert (ratio.name, ratio.value, ratio.baseline) == ("exactres.32b.32k.host", 1.5, 200.0)
    assert ratio.spread == pytest.approx(1.5 * 0.15)
    assert (raw.value, packed.value, packed.name) == (200, 300, "exactres.32b.32k.host.packed")


def test_answers_of_all_reports_are_counted_together():
    rows = [
        row("lossless.exact.answers", 100),
        row("lossless.exact.mismatches", 0),
        row("lossless.int8.answers", 40),
        row("lossless.int8.mismatches", 1),
        row("identity.answers", 60),
        row("identity.mismatches", 2),
        # A part of those.
        row("identity.demo-5m.packed.disk.answers", 20),
        row("gpu_tests.passed", 60),
    ]
    found = answers_figures(rows, "head")
    assert values(found) == {"head.answers": 200, "head.mismatches": 3}
    assert [each.baseline for each in found] == [None, 0]

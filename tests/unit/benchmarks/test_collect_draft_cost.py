"""collect_draft_cost.py: ratios of drafts with weights in 4 bits."""

from __future__ import annotations

import json
import sys

import collect_draft_cost
import pytest


def write(folder, name, values, commit="abc"):
    rows = [
        {"name": figure, "value": value, "unit": "u", "spread": spread, "baseline": None}
        for figure, (value, spread) in values.items()
    ]
    part = {"commit": commit, "date": "now", "machine": "H100", "figures": rows}
    (folder / name).write_text(json.dumps(part))


@pytest.fixture
def collect(monkeypatch, tmp_path):
    def run(*arguments):
        monkeypatch.setattr(collect_draft_cost, "RESULTS", tmp_path)
        out = tmp_path / "draft_cost.json"
        monkeypatch.setattr(sys, "argv", ["collect_draft_cost.py", *arguments, "--out", str(out)])
        collect_draft_cost.main()
        result = json.loads(out.read_text())
        return result, {row["name"]: row for row in result["figures"]}

    return run


def test_serving_is_compared_with_plain_sglang_and_with_no_copies(collect, tmp_path):
    place = "serve.8b.32k.bs1"
    measured = {
        f"{place}.exact-w4.vs_bf16": (1.6, 0.1),
        "serve.8b.32k.saturation.int8-w4.vs_bf16": (4.1, None),
        f"{place}.exact.vs_bf16": (1.0, 0.1),
        f"{place}.exact-w4.decode.tokens_per_s": (120.0, 12.0),
        f"{place}.exact.decode.tokens_per_s": (80.0, 0.0),
        f"{place}.exact-w4.start_seconds": (80.0, None),
        f"{place}.exact.start_seconds": (65.0, None),
        "serve.8b.4k.bs4.exact-w4.start_seconds": (99.0, None),
    }
    write(tmp_path, "serving.json", measured)
    result, figures = collect("--serving", "serving.json", "--saturated", "serving.json")
    assert figures["cheap.8b.32k.bs1.exact"]["value"] == 1.6
    assert figures["cheap.8b.32k.saturated.int8"]["value"] == 4.1
    ratio = figures["cheap.8b.32k.bs1.exact.vs_target_weights"]
    assert (ratio["value"], ratio["baseline"]) == (1.5, 80.0)
    assert ratio["spread"] == pytest.approx(0.15)
    # The point without a server to compare with does not count.
    assert figures["start.extra_seconds.w4"]["value"] == 15.0
    assert "cheap.8b.32k.bs1.exact.start_seconds" not in figures
    assert result["settings"]["parts"]["serving.json"]["commit"] == "abc"


def test_servers_of_different_commits_are_not_compared(collect, tmp_path):
    place = "serve.8b.4k.bs4"
    for name, system, start in (("copies.json", "exact-w4", 90.0), ("own.json", "exact", 65.0)):
        values = {
            f"{place}.{system}.decode.tokens_per_s": (100.0, 1.0),
            f"{place}.{system}.start_seconds": (start, None),
        }
        write(tmp_path, name, values, commit=name)
    _, figures = collect("--serving", "copies.json", "own.json")
    cheap = [name for name in figures if name.startswith(("cheap.", "start."))]
    assert cheap == ["cheap.8b.4k.bs4.exact.decode.tokens_per_s"]


def test_of_figures_of_one_name_the_last_part_counts(collect, tmp_path):
    for commit, ratio in (("one", 2.8), ("two", 2.9)):
        write(tmp_path, commit, {"serve.8b.32k.bs16.int8-w4.vs_bf16": (ratio, None)}, commit)
    result, figures = collect("--serving", "one", "two")
    assert figures["cheap.8b.32k.bs16.int8"]["value"] == 2.9
    assert len(result["figures"]) == len(figures)


def test_a_run_of_few_requests_does_not_count_as_saturated(collect, tmp_path):
    names = ("serve.8b.32k.bs16.int8-w4.vs_bf16", "serve.8b.32k.saturation.int8-w4.vs_bf16")
    write(tmp_path, "serving.json", {name: (2.8, None) for name in names})
    _, figures = collect("--serving", "serving.json")
    assert [name for name in figures if name.startswith("cheap.")] == ["cheap.8b.32k.bs16.int8"]


def test_acceptance_is_a_share_of_that_of_the_models_own_weights(collect, tmp_path):
    copies = {
        "views.all.mean_of_16": (15.2, 0.2),
        "views.pages.0.1.4.mean_of_16": (12.0, 0.3),
        # The other part has no such view.
        "views.pages.0.1.mean_of_16": (12.0, 0.3),
    }
    write(tmp_path, "copies.json", copies)
    own = {"views.all.mean_of_16": (16.0, 0.1), "views.pages.0.1.4.mean_of_16": (15.0, 0.1)}
    write(tmp_path, "own.json", own)
    _, figures = collect("--acceptance", "eval31m_16k=copies.json:own.json")
    name = "w4.accept.eval31m_16k.pages.0.1.4"
    assert figures[f"{name}.vs_target_weights"]["value"] == 0.8
    assert figures[f"{name}.mean_of_16"]["spread"] == 0.3
    assert figures["w4.accept.vs_target_weights"]["value"] == pytest.approx(0.95)
    assert "w4.accept.eval31m_16k.pages.0.1.mean_of_16" not in figures


def test_answers_of_all_parts_are_counted_together(collect, tmp_path):
    for name, answers in (("one.json", 69), ("two.json", 300)):
        counts = {"lossless.exact.answers": (answers, None), "gpu_tests.passed": (6, None)}
        write(tmp_path, name, {**counts, "lossless.exact.mismatches": (1, None)})
    _, figures = collect("--answers", "one.json", "two.json")
    assert figures["draft_cost.identity.answers"]["value"] == 369
    assert figures["draft_cost.identity.mismatches"]["value"] == 2

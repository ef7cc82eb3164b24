"""collect_lossless.py: ratios of servers within one part."""

from __future__ import annotations

import json
import sys
from dataclasses import fields, replace

import collect_lossless
from serving.records import DecodeRate, Pass, Record, append


def record(system, rate, context=32768, start_s=60.0):
    decode_rate = DecodeRate(rate, 1.0, steady=True)
    fields = {"decode_rate": decode_rate, "start_s": start_s, "machine": "H200", "commit": "abc"}
    return Record("8b", context, 16, system, "replayed", context, 512, **fields)


def collect(monkeypatch, tmp_path, *arguments):
    monkeypatch.setattr(collect_lossless, "RESULTS", tmp_path)
    out = tmp_path / "lossless.json"
    monkeypatch.setattr(sys, "argv", ["collect_lossless.py", *arguments, "--out", str(out)])
    collect_lossless.main()
    result = json.loads(out.read_text())
    return result, {figure["name"]: figure for figure in result["figures"]}


def test_ratios_are_of_medians_of_one_part(monkeypatch, tmp_path):
    for rate in (90.0, 10.0, 80.0):
        append(tmp_path / "one.jsonl", record("exact-deterministic", rate, start_s=65.0))
        append(tmp_path / "one.jsonl", record("exact", 100.0))
    append(tmp_path / "two.jsonl", record("exact-deterministic", 60.0))
    for system, rate in (("exact", 61.0), ("bf16", 40.0)):
        append(tmp_path / "two.jsonl", record(system, rate))
    parts = ("--serving", "one.jsonl", "two.jsonl")
    result, figures = collect(monkeypatch, tmp_path, *parts)
    fast = figures["lossless.vs_fast.exact.32k"]
    assert (fast["value"], fast["baseline"]) == (0.8, 100.0)
    assert fast["spread"] == 0.8 * (40 / 80)
    # The first part has no bf16.
    assert figures["lossless.vs_plain.32k"]["value"] == 1.5
    assert figures["lossless.start.extra_seconds"]["value"] == 5.0
    rates = result["settings"]["rates"]["one.jsonl"]["8b.32k.bs16"]
    assert rates["exact-deterministic"] == [90.0, 10.0, 80.0]
    assert result["settings"]["parts"]["two.jsonl"]["commit"] == "abc"


def test_other_parts_keep_their_figures(monkeypatch, tmp_path):
    rows = {
        "identity.json": "identity.gpu.deterministic.mismatches_vs_draft_off",
        "seeded.json": "lossless.seeded.mismatches",
        "kernels.json": "product.layer.16_rows.vs_torch",
    }
    for file, name in rows.items():
        row = {"name": name, "value": 1, "unit": "u", "spread": None, "baseline": 2}
        left_out = {**row, "name": "product.qkv.16_rows.torch.us"}
        figures = [row, left_out] if file == "kernels.json" else [row]
        part = {"commit": "abc", "date": "now", "machine": "H100", "figures": figures}
        (tmp_path / file).write_text(json.dumps(part))
    options = ("--identity", "identity.json", "--seeded", "seeded.json", "--kernels")
    _, figures = collect(monkeypatch, tmp_path, *options, "kernels.json")
    assert list(figures) == [
        "lossless.exact.mismatches_vs_draft_off",
        "lossless.seeded.mismatches",
        "lossless.product.layer.16_rows.vs_torch",
    ]


def test_answers_of_all_models_are_counted_together(monkeypatch, tmp_path):
    for file, answers, differ in (("one.json", 600, 0), ("two.json", 500, 2)):
        values = {"lossless.int8.answers": answers, "lossless.int8.mismatches": differ}
        values["gpu_tests.passed"] = 7
        rows = [
            {"name": name, "value": value, "unit": "u", "spread": None, "baseline": None}
            for name, value in values.items()
        ]
        part = {"commit": "abc", "date": "now", "machine": "H200", "figures": rows}
        (tmp_path / file).write_text(json.dumps(part))
    _, figures = collect(monkeypatch, tmp_path, "--answers", "one.json", "two.json")
    assert figures["lossless.int8.answers"]["value"] == 1100
    assert figures["lossless.int8.mismatches"]["value"] == 2
    assert "gpu_tests.passed" not in figures
    _, figures = collect(monkeypatch, tmp_path, "--tests", "one.json", "two.json")
    assert {name: figure["value"] for name, figure in figures.items()} == {"gpu_tests.passed": 14}


def test_starts_of_both_targets_are_averaged(monkeypatch, tmp_path):
    starts = {"exact-deterministic": 70, "exact": 60, "int8": 72, "int8-deterministic": 66}
    for system, start_s in starts.items():
        append(tmp_path / "one.jsonl", record(system, 1.0, start_s=start_s))
    _, figures = collect(monkeypatch, tmp_path, "--serving", "one.jsonl")
    assert figures["lossless.start.extra_seconds"]["value"] == 2.0
    assert figures["lossless.start.extra_seconds"]["spread"] == 8.0


def test_prefill_is_compared_where_it_was_measured(monkeypatch, tmp_path):
    for system, rate in (("int8-deterministic", 80.0), ("int8", 100.0)):
        pass_with_prefill = Pass(rate, *[0.0] * (len(fields(Pass)) - 1))
        append(tmp_path / "one.jsonl", replace(record(system, rate), end_to_end=pass_with_prefill))
    _, figures = collect(monkeypatch, tmp_path, "--serving", "one.jsonl")
    assert figures["lossless.vs_fast.int8.32k.with_prefill"]["value"] == 0.8


def test_both_targets_are_compared_with_their_fast_arithmetic(monkeypatch, tmp_path):
    for system, rate in (("int8-deterministic", 95.0), ("int8", 100.0)):
        append(tmp_path / "one.jsonl", record(system, rate))
    _, figures = collect(monkeypatch, tmp_path, "--serving", "one.jsonl")
    assert figures["lossless.vs_fast.int8.32k"]["value"] == 0.95

"""From the times of tokens to rates, ratios, and the tables of the README."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from serving import tables
from serving.decode_rate import decode_rate
from serving.figures import all_figures, best, decode_rate_of
from serving.records import DecodeRate, Pass, Record, append, latest, read
from serving.report import acceptance_note, console_table, write_report

PASS = Pass(50.0, 450.0, 900.0, 1000.0, 10.0, 20.0, 11.0, 9.0)


def record(system, concurrency=16, rate=None, spread=1.0, **fields):
    """A point of the 8B shape at 32K with this decode rate."""
    acceptance = "replayed" if system in ("exact", "int8") else ""
    found = None if rate is None else DecodeRate(rate, spread, steady=True)
    base = Record("8b", 32768, concurrency, system, acceptance, 32768, 512, machine="H200")
    return replace(base, decode_rate=found, **fields)


def by_name(records):
    return {figure.name: figure for figure in all_figures(records)}


def test_decode_rate_is_that_of_the_time_in_which_all_decode():
    """Ten tokens a second each; one starts a second late, the other ends a second early."""
    rate = decode_rate([1.0, 2.0], [[0.1] * 50, [0.1] * 50])
    assert rate.tokens_per_s == pytest.approx(20, rel=0.03)
    assert rate.steady


def test_the_spread_tells_an_even_pass_from_an_uneven_one():
    even = decode_rate([0.0], [[0.1] * 800])
    uneven = decode_rate([0.0], [([0.05] * 100 + [0.2] * 25) * 4])
    assert even.spread < 0.1 < uneven.spread


def test_requests_that_waited_for_each_other_are_marked():
    rate = decode_rate([0.0, 9.0], [[0.1] * 50, [0.1] * 50])
    assert rate == DecodeRate(pytest.approx(100 / 14), None, steady=False)


def test_nothing_decoded_is_no_rate():
    assert decode_rate([1.0, 1.0], [[], []]) is None


def test_ratios_at_a_point_and_their_spread():
    found = by_name([record("bf16", rate=100.0, spread=3.0), record("int8", rate=200.0, spread=8)])
    ratio = found["serve.8b.32k.bs16.int8.vs_bf16"]
    assert ratio.value == 2.0
    assert ratio.spread == pytest.approx(2 * (0.03**2 + 0.04**2) ** 0.5)
    assert ratio.baseline == 100.0
    assert "replayed" in ratio.unit
    assert not any("saturation" in name for name in found)


def test_prefill_is_counted_apart():
    records = [
        record("bf16", end_to_end=PASS),
        record("exact", end_to_end=replace(PASS, output_tokens_per_s=60.0)),
    ]
    found = by_name(records)
    assert found["serve.8b.32k.bs16.exact.vs_bf16_end_to_end"].value == 1.2
    assert "serve.8b.32k.bs16.exact.vs_bf16" not in found
    assert found["serve.8b.32k.bs16.exact.end_to_end.itl_p99_ms"].value == 20.0


def test_saturation_takes_each_side_at_its_own_best():
    records = [
        record("bf16", 16, 800.0),
        record("bf16", 24, 900.0),
        record("exact", 16, 1200.0),
        record("int8", 24, 1500.0),
        record("int8", 46, 2250.0),
        record("int8", 60, 2000.0),
        record("fp8", 46, 9000.0),
    ]
    assert best(records, decode_rate_of).system == "fp8"
    found = by_name(records)
    ratio = found["serve.8b.32k.saturation.int8.vs_bf16"]
    assert (ratio.value, ratio.baseline) == (2.5, 900.0)
    assert "at 46 against 24 requests" in ratio.unit
    overall = found["serve.8b.32k.saturation.vs_bf16"]
    assert overall.value == 2.5
    assert overall.unit.endswith("int8")


def test_contexts_are_not_mixed():
    other = replace(record("int8", rate=300.0), context_len=4096)
    assert not any("vs_bf16" in name for name in by_name([record("bf16", rate=100.0), other]))


def test_a_draft_iteration_is_held_against_a_plain_step():
    records = [
        record("bf16", rate=800.0),
        record("exact", draft_iter_ms=10.0),
        record("int8", draft_iter_ms=9.0),
    ]
    figure = by_name(records)["serve.8b.32k.bs16.draft_iter_ms"]
    assert (figure.value, figure.baseline) == (10.0, 20.0)
    assert "serve.8b.32k.bs16.draft_iter_ms" not in by_name([record("exact", rate=1.0)])


def test_the_first_start_of_a_run_does_not_count():
    cold = record("bf16", start_s=100.0, first_start=True, date="a")
    assert "start.extra_seconds" not in by_name([cold, record("int8", start_s=70.0, date="b")])
    warm = record("fp8", start_s=60.0, date="c")
    figure = by_name([cold, warm, record("int8", start_s=70.0, date="b")])["start.extra_seconds"]
    assert (figure.value, figure.baseline) == (10.0, 60.0)


def test_points_outlive_their_run(tmp_path):
    path = tmp_path / "new" / "points.jsonl"
    records = [record("bf16", rate=100.0, decode=PASS), record("int8", counters={"drafted": 3})]
    for one in records:
        append(path, one)
    assert read(path) == records


def test_a_later_pass_replaces_an_earlier_one_alone():
    first = record("bf16", rate=100.0, decode=PASS)
    second = record("bf16", end_to_end=PASS, hbm_gib=5.0)
    third = record("bf16", rate=110.0, decode=PASS)
    (found,) = latest([first, second, third])
    assert found.decode_rate.tokens_per_s == 110.0
    assert found.end_to_end == PASS


def test_machines_are_not_compared():
    with pytest.raises(ValueError, match="different machines"):
        latest([record("bf16"), replace(record("int8"), machine="H100")])


def test_reports_begin_with_where_acceptance_comes_from(tmp_path):
    records = [record("bf16", rate=100.0), record("int8", rate=160.0, end_to_end=PASS)]
    note, table = console_table(records, "CURVE", [])
    assert note == acceptance_note(records, "CURVE") == "acceptance is REPLAYED from CURVE"
    assert "REPLAYED" in table.title
    path = tmp_path / "serving.json"
    write_report(path, records, "CURVE", ["8b.32k.bs1 int8: no time"])
    written = json.loads(path.read_text())
    assert next(iter(written["settings"])) == "acceptance"
    figures = {figure["name"]: figure for figure in written["figures"]}
    lines = tables.lines(figures, note, written["machine"])
    assert "REPLAYED from CURVE" in lines[0]
    heads = [line for line, below in pairwise(lines) if below.startswith("|---")]
    assert len(heads) == 2
    assert all("REPLAYED" in head for head in heads)
    (headline,) = [line for line in lines if ">= 1.6" in line]
    assert "| 1.60 ± " in headline
    assert "100 tokens/s" in headline


def test_without_results_the_readme_is_left_alone(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tables, "RESULT", tmp_path / "none.json")
    monkeypatch.setattr(tables, "README", tmp_path / "README.md")
    tables.main()
    assert "nothing is written" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())

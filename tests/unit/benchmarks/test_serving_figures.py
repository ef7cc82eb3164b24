"""Rates and ratios from the times of tokens, and the tables of the documentation."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
from serving import tables
from serving.decode_rate import decode_rate, rate_of_passes
from serving.figures import all_figures, best, decode_rate_of
from serving.identity import read_identity
from serving.records import DecodeRate, Pass, Record, append, consecutive, latest, read, write
from serving.report import acceptance_note, console_table, write_report

PASS = Pass(50.0, 450.0, 900.0, 1000.0, 10.0, 20.0, 11.0, 9.0)


def record(system, concurrency=16, rate=None, spread=1.0, **fields):
    """Make a point of the 8B shape at 32K with this decode rate."""
    acceptance = "replayed" if system in ("exact", "int8") else ""
    found = None if rate is None else DecodeRate(rate, spread, steady=True)
    base = Record("8b", 32768, concurrency, system, acceptance, 32768, 512, machine="H200")
    return replace(base, decode_rate=found, **fields)


def by_name(records):
    return {figure.name: figure for figure in all_figures(records)}


def as_rows(figures):
    """Return figures in the form in which a result is read."""
    return {name: asdict(figure) for name, figure in figures.items()}


def test_the_rate_of_several_passes_is_all_tokens_over_all_time():
    passes = [DecodeRate(100.0, 5.0, steady=True), DecodeRate(300.0, None, steady=False)]
    assert rate_of_passes(passes[:1]) == passes[0]
    rate = rate_of_passes(passes)
    # 300 tokens take 3 s, and then 1 s.
    assert rate.tokens_per_s == pytest.approx(600 / 4)
    assert rate.spread is not None
    assert rate.spread > 0
    assert not rate.steady


def test_decode_rate_is_that_of_the_time_in_which_all_decode():
    """Each request decodes ten tokens a second. One starts a second late, and the other ends a
    second early."""
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


def test_drafts_of_some_pages_are_compared_with_drafts_of_all():
    some, all_pages = record("exact", rate=150.0), record("exact-all", rate=120.0)
    found = by_name([some, all_pages, record("int8", rate=200.0)])
    ratios = {name: each for name, each in found.items() if name.endswith(".vs_all")}
    assert list(ratios) == ["serve.8b.32k.bs16.exact.vs_all"]
    assert ratios["serve.8b.32k.bs16.exact.vs_all"].value == pytest.approx(1.25)
    assert ratios["serve.8b.32k.bs16.exact.vs_all"].baseline == 120.0


def test_prefill_is_counted_separately():
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
    # With one concurrency each, these systems need not be at their best.
    assert not any(f"saturation.{system}" in name for name in found for system in ("exact", "fp8"))
    assert not any("saturation" in name for name in by_name([records[0], *records[3:]]))


@pytest.mark.parametrize(("room", "is_best"), [(17, True), (40, False), (None, True)])
def test_saturation_is_not_that_of_a_system_that_was_asked_for_little(room, is_best):
    """The system had at most 16 requests, while bf16 is best with 24."""
    tokens = None if room is None else room * (32768 + 512)
    records = [
        record("bf16", 16, 800.0),
        record("bf16", 24, 900.0),
        record("int8", 4, 500.0, max_total_num_tokens=tokens),
        record("int8", 16, 1000.0, max_total_num_tokens=tokens),
    ]
    assert ("serve.8b.32k.saturation.int8.vs_bf16" in by_name(records)) == is_best


def test_contexts_are_not_mixed():
    other = replace(record("int8", rate=300.0), context_len=4096)
    assert not any("vs_bf16" in name for name in by_name([record("bf16", rate=100.0), other]))


def test_a_draft_iteration_is_compared_with_a_plain_step():
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
    assert figure.unit == "s, median of 1 against 1 of plain SGLang"


def test_starts_of_different_models_are_not_compared():
    """The server of the small model starts sooner with any system."""
    records = [
        record("bf16", start_s=60.0, date="a"),
        record("int8", start_s=65.0, date="b"),
        record("int8", start_s=40.0, date="c", model="small"),
    ]
    assert by_name(records)["start.extra_seconds"].value == 5.0
    records.append(record("bf16", start_s=30.0, date="d", model="small"))
    figure = by_name(records)["start.extra_seconds"]
    assert (figure.value, figure.baseline) == (10.0, 30.0)


def test_of_consecutive_runs_only_the_first_start_was_cold():
    """Each run marked its own first server as a cold start."""
    records = [
        record("int8", start_s=60.0, first_start=True, date="b"),
        record("exact", start_s=99.0, first_start=True, date="a"),
        record("bf16", start_s=57.0, first_start=True, date="c"),
        record("bf16", 26, start_s=49.0, first_start=True, date="d"),
    ]
    assert "start.extra_seconds" not in by_name(records)
    known = consecutive(records)
    assert [one.first_start for one in known] == [False, True, False, False]
    figure = by_name(known)["start.extra_seconds"]
    assert (figure.value, figure.baseline) == (7.0, 53.0)


def test_points_outlive_their_run(tmp_path):
    path = tmp_path / "new" / "points.jsonl"
    records = [record("bf16", rate=100.0, decode=PASS), record("int8", counters={"drafted": 3})]
    for one in records:
        append(path, one)
    assert read(path) == records
    write(path, records[1:])
    assert read(path) == records[1:]


def test_a_later_pass_replaces_an_earlier_one_alone():
    first = record("bf16", rate=100.0, decode=PASS)
    second = record("bf16", end_to_end=PASS, hbm_gib=5.0)
    third = record("bf16", rate=110.0, decode=PASS)
    (found,) = latest([first, second, third])
    assert found.decode_rate.tokens_per_s == 110.0
    assert found.end_to_end == PASS


def test_of_repeats_on_one_server_the_median_is_reported():
    rates = (110.0, 30.0, 100.0)
    repeats = [record("int8", rate=rate, decode=PASS) for rate in rates]
    assert latest(repeats)[0].decode_rate.tokens_per_s == 100.0
    assert latest(repeats[:2])[0].decode_rate.tokens_per_s == 30.0
    # Another server replaces them, even with the same rates.
    later = replace(repeats[1], start_s=99.0)
    assert latest([*repeats, later])[0].decode_rate.tokens_per_s == 30.0


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
    assert "TTFT" in heads[1]
    (headline,) = [line for line in lines if ">= 1.6" in line]
    assert "| 1.60 ± " in headline
    assert "100 tokens/s" in headline


def test_a_report_says_what_its_points_were_measured_with(tmp_path):
    records = [record("bf16", rate=100.0, versions={"sglang": "0.5.17"})]
    write_report(tmp_path / "new.json", records, "CURVE", [])
    assert json.loads((tmp_path / "new.json").read_text())["versions"] == {"sglang": "0.5.17"}
    write_report(tmp_path / "old.json", [record("bf16", rate=100.0)], "CURVE", [])
    assert json.loads((tmp_path / "old.json").read_text())["versions"] == {}


def test_the_head_of_a_table_says_what_was_replayed():
    source = "accept.uniform4 of acceptance.json (eval-31m, 4096-token prompts)"
    figures = by_name([record("bf16", rate=100.0), record("bf16", 24, rate=110.0)])
    figures |= by_name([record("exact", rate=150.0), record("exact", 24, rate=160.0)])
    rows = tables.points(as_rows(figures), acceptance_note([record("exact")], source))
    assert rows[0].startswith("| acceptance is REPLAYED from accept.uniform4 | requests |")
    # Without a pass from empty caches there are no columns for it.
    assert "TTFT" not in rows[0]
    assert "prefill" not in rows[0]
    assert {row.count("|") for row in rows} == {rows[0].count("|")}


def test_headlines_say_how_many_requests_each_side_had():
    records = [record("bf16", n, rate) for n, rate in ((16, 80.0), (26, 90.0))]
    records += [record("int8", n, rate) for n, rate in ((16, 130.0), (40, 180.0))]
    rows = tables.headlines(as_rows(by_name(records)), "nothing was drafted")
    (row,) = [row for row in rows if "fastest measured concurrency" in row]
    assert ", at 40 against 26 requests | 2.00 ± 0.02 x |" in row


def test_curves_separate_places_and_systems():
    records = [record("bf16", rate=80.0), record("int8", 40, 180.0, spread=None)]
    records.append(replace(record("bf16", rate=300.0), context_len=4096))
    assert tables.curves(as_rows(by_name(records))) == {
        "8b.4k": {"bf16": [(16, 300.0, 1.0)]},
        "8b.32k": {"bf16": [(16, 80.0, 1.0)], "int8": [(40, 180.0, 0.0)]},
    }


def test_the_documentation_gets_its_tables_and_plot(monkeypatch, tmp_path, identity_path):
    result = tmp_path / "serving.json"
    records = [record("bf16", rate=100.0), record("int8", rate=160.0)]
    write_report(result, records, "CURVE", [], read_identity(identity_path))
    for name, path in (("RESULT", result), ("PROFILE", tmp_path / "none")):
        monkeypatch.setattr(tables, name, path)
    text = tables.block()
    tables.draw()
    assert "| `exact` against drafting off | 41 of 200 | 0.125 | 0 |" in text
    assert "acceptance is real: eval-31m" in text
    assert "commit 330bf0a; comparison" in text
    assert result.with_suffix(".png").stat().st_size > 0
    prose = [line for line in text.splitlines() if not line.startswith("|")]
    assert max(map(len, prose)) <= tables.WIDTH


def test_without_results_the_block_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "RESULT", tmp_path / "none.json")
    tables.draw()
    assert tables.block() == "Nothing was measured: there is no `none.json`."
    assert not list(tmp_path.iterdir())

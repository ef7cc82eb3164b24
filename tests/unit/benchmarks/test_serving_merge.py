"""bench_serving.py --merge: one file of points and one of figures from several runs."""

from __future__ import annotations

import json
import sys

import bench_serving
import pytest
from serving.identity import NAME, find_identity, read_identity
from serving.records import DecodeRate, Pass, Record, append, read


def point(system, rate, date, *, start_s=60.0, **fields):
    target = system in ("exact", "int8")
    return Record(
        "8b",
        32768,
        16,
        system,
        "replayed" if target else "",
        32768,
        512,
        decode=Pass(rate, rate, 900.0, 1000.0, 10.0, 20.0, 11.0, 9.0),
        decode_rate=DecodeRate(rate, 1.0, steady=True),
        server_arguments=["--kvspec-codec=uniform4"] if target else [],
        start_s=start_s,
        first_start=True,
        machine="H200",
        date=date,
        **fields,
    )


@pytest.fixture
def runs(tmp_path):
    """Two files of points. The second file measures one point of the first again."""
    paths = [tmp_path / "a.points.jsonl", tmp_path / "b.points.jsonl"]
    append(paths[0], point("int8", 160.0, "a"))
    append(paths[0], point("bf16", 90.0, "b"))
    append(paths[1], point("bf16", 100.0, "c", start_s=61.0))
    return paths


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out" / "serving.json"


def merge(monkeypatch, out, *arguments):
    arguments = ("bench_serving.py", "--out", out, "--codec", "uniform4", "--merge", *arguments)
    monkeypatch.setattr(sys, "argv", [str(argument) for argument in arguments])
    assert bench_serving.main() == 0
    return json.loads(out.read_text())


def figures_of(report):
    return {figure["name"]: figure["value"] for figure in report["figures"]}


def test_the_latest_of_each_point_is_kept(monkeypatch, runs, out):
    report = merge(monkeypatch, out, *runs)
    assert figures_of(report)["serve.8b.32k.bs16.int8.vs_bf16"] == 1.6
    merged = read(out.with_suffix(".points.jsonl"))
    assert [record.decode_rate.tokens_per_s for record in merged] == [160.0, 90.0, 100.0]
    assert "identity" not in report["settings"]
    # Merging the result again does not change it.
    again = merge(monkeypatch, out, out.with_suffix(".points.jsonl"))
    assert again["figures"] == report["figures"]


def test_consecutive_runs_share_one_cold_start(monkeypatch, runs, out):
    # The run whose point is replaced still counts: its start was the first.
    append(runs[0], point("exact", 120.0, "0"))
    append(runs[1], point("exact", 130.0, "d", start_s=61.0))
    assert "start.extra_seconds" not in figures_of(merge(monkeypatch, out, *runs))
    out.with_suffix(".points.jsonl").unlink()
    report = merge(monkeypatch, out, *runs, "--consecutive")
    # int8 took 60 s and exact 61 s, plain SGLang 61 s.
    assert figures_of(report)["start.extra_seconds"] == -0.5
    merged = read(out.with_suffix(".points.jsonl"))
    assert [record.date for record in merged if record.first_start] == ["0"]


def test_the_cold_start_is_named(monkeypatch, runs, out):
    starts = merge(monkeypatch, out, *runs, "--consecutive")["settings"]["starts"]
    assert starts == [
        "a 8b int8: 60.0 s, first start: no file had been read and no kernel compiled yet",
        "c 8b bf16: 61.0 s",
    ]


def test_what_was_compiled_while_serving_is_named(monkeypatch, runs, out):
    append(runs[1], point("exact", 120.0, "d", compiled=["_sample", "_sample"]))
    append(runs[1], point("fp8", 110.0, "e", compiled=[]))
    report = merge(monkeypatch, out, *runs)
    named = report["settings"]["compiled_while_serving"]
    assert named == {"8b.32k.bs16.exact": ["_sample", "_sample"]}
    found = figures_of(report)
    assert found["serve.8b.32k.bs16.exact.compiled"] == 2
    assert found["serve.8b.32k.bs16.fp8.compiled"] == 0
    # This point has no record of compilations.
    assert "serve.8b.32k.bs16.bf16.compiled" not in found


def test_points_that_are_there_are_not_lost(monkeypatch, runs, out):
    append(out.with_suffix(".points.jsonl"), point("fp8", 110.0, "e"))
    with pytest.raises(SystemExit, match="has points already"):
        merge(monkeypatch, out, *runs)
    assert len(read(out.with_suffix(".points.jsonl"))) == 1


def test_a_curve_of_another_codec_is_refused(monkeypatch, runs, out):
    with pytest.raises(SystemExit, match="int8 was not measured with --kvspec-codec=log4"):
        merge(monkeypatch, out, *runs, "--codec", "log4")
    assert not out.exists()


def test_consecutive_is_about_merging(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench_serving.py", "--points", "8b:4k:1", "--consecutive"])
    with pytest.raises(SystemExit):
        bench_serving.main()


@pytest.mark.parametrize("named", [True, False], ids=["named", "beside the output"])
def test_identity_is_copied(monkeypatch, runs, out, identity_path, named):
    if named:
        runs += ["--identity", identity_path]
    else:
        out.parent.mkdir()
        identity_path.rename(out.with_name(NAME))
    report = merge(monkeypatch, out, *runs)
    found = figures_of(report)
    assert found["identity.gpu.mismatches_vs_draft_off"] == 41
    assert "something.else" not in found
    assert report["settings"]["identity"]["measured_at"].startswith("330bf0a107c9bb8f ")
    assert report["settings"]["identity"]["model"] == "eval-31m"


def test_identity_of_another_machine_is_refused(monkeypatch, runs, out, identity_path):
    identity_path.write_text(identity_path.read_text().replace("H200", "H100"))
    with pytest.raises(SystemExit, match="was measured on H100, the points on H200"):
        merge(monkeypatch, out, *runs, "--identity", identity_path)
    assert not out.exists()


def test_identity_that_is_named_must_exist(tmp_path, out, identity_path):
    with pytest.raises(FileNotFoundError):
        find_identity(tmp_path / "none.json", out, "H200")
    assert find_identity(None, out, "H200") is None
    identity_path.write_text(json.dumps({"figures": []}))
    with pytest.raises(ValueError, match="has no figures"):
        read_identity(identity_path)

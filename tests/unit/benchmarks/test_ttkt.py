"""Ratios, tables and plots of measured transfers, from any set of points."""

from __future__ import annotations

import json

import pytest
from ttkt.doc_table import gpu_lines
from ttkt.figures import draw, figures
from ttkt.points import TOKENS, Point, append_point, read_points

# Seconds in which the link sends the KV in full, times the share of the bytes.
SHARE = {"split": 0.3, "packed": 0.3, "full": 1.0, "int8": 0.5, "int4": 0.28, "cachegen": 0.25}


def point(mode, full_s, prompt_len=4096, **changes):
    first = SHARE[mode] * full_s
    values = {
        "mode": mode,
        "prompt_len": prompt_len,
        "prompt": 0,
        "full_s": full_s,
        "computed_s": tuple(first + 0.001 * k for k in TOKENS),
        "seen_s": tuple(0.8 * full_s + 1.0 if mode == "packed" else full_s + 1.0 for _ in TOKENS),
        "anchors_s": first,
        "residuals_s": 1.3 * full_s if mode == "split" else None,
        "drafted_first": 32 if mode == "split" else 0,
        "accepted_first": 27 if mode == "split" else 0,
        "num_bytes": 790 if mode == "packed" else 1000,
        "output": (1, 2, 3) if mode in ("split", "packed", "full") else (1, 2, 4),
    }
    return Point(**(values | changes))


@pytest.fixture
def points():
    return [point(mode, full_s) for mode in SHARE for full_s in (1.0, 5.0)]


def value_of(points):
    return {figure.name: figure.value for figure in figures(points)}


def test_ratios_of_all_links_and_of_each(points):
    found = value_of(points)
    assert found["ttkt.tt2t_vs_full.at_1s"] == pytest.approx(0.302 / 1.002)
    assert found["ttkt.tt2t_vs_full.at_5s"] == pytest.approx(1.502 / 5.002)
    both = (0.302 / 1.002 + 1.502 / 5.002) / 2
    assert found["ttkt.tt2t_vs_full"] == pytest.approx(both)
    assert found["ttkt.tt32t_vs_int8.worst"] == pytest.approx(0.332 / 0.532)
    assert found["ttkt.identical.split"] == 1
    assert found["ttkt.identical.int4"] == 0
    assert found["ttkt.drafted_before_first_verification.mean"] == 32
    assert found["ttkt.accepted_at_first_verification.mean"] == 27


def test_packed_residuals_count_as_a_client_sees_them(points):
    found = value_of(points)
    both = (1.8 / 2.0 + 5.0 / 6.0) / 2
    assert found["exactres.ttkt.client_tt2t_vs_full"] == pytest.approx(both)
    assert found["exactres.ttkt.client_tt32t_vs_full.worst"] == pytest.approx(0.9)
    assert found["exactres.wire.bytes_vs_full"] == pytest.approx(0.79)
    assert not any("exactres" in name for name in value_of([p for p in points if p.mode != "full"]))


def test_points_without_their_counterpart_count_nowhere(points):
    alone = [p for p in points if p.mode == "split"]
    assert "ttkt.tt2t_vs_full" not in value_of(alone)
    assert value_of(alone)["ttkt.accepted_at_first_verification"] == 27 / 32
    undrafted = [point("split", 1.0, drafted_first=0, accepted_first=0)]
    assert value_of(undrafted)["ttkt.accepted_at_first_verification"] == 0


def write(path, points):
    for each in points:
        append_point(path.with_suffix(".points.jsonl"), each)
    rows = [
        {"name": f.name, "value": f.value, "baseline": f.baseline, "spread": f.spread}
        for f in figures(points)
    ]
    path.write_text(json.dumps({"machine": "NVIDIA H200", "figures": rows}), encoding="utf-8")


def test_the_readme_says_what_is_there(points, tmp_path):
    path = tmp_path / "ttkt_h200.json"
    assert "has not been measured" in gpu_lines(path)
    write(path, points)
    assert read_points(path.with_suffix(".points.jsonl")) == points
    text = gpu_lines(path)
    assert "On one NVIDIA H200" in text
    assert "| time to the 2nd token, `split` against `full` | 0.30 | 0.30 |" in text
    assert "| 4,096 | 5 s | 1.50 / 1.53 | 1.50 / 1.53 | 5.00 / 5.03 |" in text
    assert "`split` 100%, `packed` 100%, `int8` 0%" in text
    assert "27.0 of 32.0 drafts" in text


def test_a_run_of_some_modes_is_shown_too(points, tmp_path):
    path = tmp_path / "ttkt_h200.json"
    write(path, [p for p in points if p.mode in ("split", "int4")])
    text = gpu_lines(path)
    assert "against `int4`" in text
    assert "against `full`" not in text
    assert "`int8`" not in text
    draw(tmp_path / "ttkt.png", points)
    assert (tmp_path / "ttkt.png").stat().st_size > 0
